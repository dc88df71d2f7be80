// Extends every candidate by a run of slots in bfloat16, with float32 sums, on the matrix units.
//
// A cluster of blocks holds the whole model, a layer on two blocks, its sides: each has half of the heads and of the
// hidden units. Weights stay where they are for a whole run, in shared memory and registers; it is candidates that
// travel. Groups of up to ROWS of them follow each other from layer to layer as on an assembly line, then to the block
// that draws their tokens, and back to the first layer. With as many groups as layers nobody has to wait for long.

// Whose turn it is: which token of which group.
struct Turn {
    int step, number;
    __device__ void next(int count) {
        if (++number == count) number = 0, ++step;
    }
};

struct Line {
    const Run& run;
    Room& room;
    const int layer, side, first_group, count; // groups of this cluster
    const int num_steps, warp, lane, half, strip;
    Attention attention;
    uint4 up[8], kept[4]; // weights in registers; `kept` are of `down` in the first half of the warps, of `out` in the other

    __device__ Line(const Run& run, Room& room, int rank, int first_group)
        : run(run), room(room), layer(rank / SIDES), side(rank % SIDES), first_group(first_group),
          count(run.all_groups - first_group < run.each ? run.all_groups - first_group : run.each),
          num_steps(run.num_given - 1 + run.num_slots), warp(thread / LANES), lane(thread % LANES), half(warp / STRIPS),
          strip(warp % STRIPS), attention{run, room, rank / SIDES, rank % SIDES} {}

    // -- Before the first token ------------------------------------------------------------------------------------

    __device__ void load_weights() {
        const Number* weights = run.weights + (long long)(layer * SIDES + side) * PER_SIDE;
        const Number* first_half = weights + DOWN_PLACE;
        const Number* second_half = first_half + WIDTH * OWN_HIDDEN / 2;
        const auto copy = [](uint4* into, const Number* from, int place) {
            begin_copy(into, reinterpret_cast<const uint4*>(from) + place);
        };
        for (int i = thread; i < QKV_STRIPS * 8 * LANES; i += THREADS) copy(room.qkv + i, weights, i);
        for (int i = thread; i < STRIPS * 8 * LANES; i += THREADS) {
            const int piece = i / LANES % 8, its_strip = i / LANES / 8, its_lane = i % LANES;
            copy(&room.down[its_strip][piece][its_lane], second_half, i);
            if (piece >= 4) copy(&room.down[its_strip][4 + piece][its_lane], first_half, i);
        }
        end_group();
        const float* vectors = run.vectors + layer * VECTORS;
        for (int i = thread; i < WIDTH; i += THREADS) {
            const int f = feature_of(i);
            for (int part = 0; part < 2; ++part) {
                room.first_norm[part * WIDTH + i] = vectors[part * WIDTH + f];
                room.second_norm[part * WIDTH + i] = vectors[(6 + part) * WIDTH + f];
                room.last_norm[part * WIDTH + i] = run.vectors[LAYERS * VECTORS + part * WIDTH + f];
            }
            room.out_bias[i] = vectors[5 * WIDTH + f];
            room.down_bias[i] = vectors[12 * WIDTH + f];
        }
        for (int i = thread; i < 3 * OWN_WIDTH; i += THREADS)
            room.qkv_bias[i] = vectors[(2 + i / OWN_WIDTH) * WIDTH + side * OWN_WIDTH + i % OWN_WIDTH];
        for (int i = thread; i < OWN_HIDDEN; i += THREADS) room.up_bias[i] = vectors[8 * WIDTH + side * OWN_HIDDEN + i];
        for (int i = thread; i < OWN_HEADS * HEAD_TILE; i += THREADS) room.keys[i] = room.values[i] = 0;
    }

    // Last, as nothing else needs many registers then.
    __device__ void load_registers() {
        const Number* weights = run.weights + (long long)(layer * SIDES + side) * PER_SIDE;
        fetch(up, weights + UP_PLACE, warp * 8);
        if (half) fetch(kept, weights + OUT_PLACE, strip * 4);
        else fetch(kept, weights + DOWN_PLACE, strip * 8);
    }

    __device__ void make_barriers() {
        const auto make = [](Barrier* barrier, int bytes) { make_barrier(barrier), expect(barrier, bytes); };
        if (thread == 0) {
            make(&room.before.arrived, SIDES * PART), make(&room.finished.arrived, SIDES * PART);
            make(&room.exchanged[0], SIDES * PART), make(&room.exchanged[1], SIDES * PART);
            make(&room.taken, SIDES * 8);
            for (int i = 0; i < LAYERS; ++i) make(&room.finished_taken[i], 8);
            for (int number = 0; number < count; ++number) make(&room.drawn[number], Group(run, first_group + number).rows * 8);
        }
    }

    // Blocks share the work, as all need the same lists.
    __device__ void list_all() {
        for (int i = thread; i < count * ROWS; i += THREADS) {
            const Group group(run, first_group + i / ROWS);
            if (i % ROWS == 0) room.groups[i / ROWS] = group;
            room.candidates[i / ROWS][i % ROWS] = group.candidate(run, i % ROWS);
        }
        synchronize();
        for (int i = thread; i < num_drawn(layer) * ROWS; i += THREADS) {
            const int number = layer + i / ROWS * LAYERS;
            room.tallies[i / ROWS][i % ROWS] = room.groups[number].tally(run, room.candidates[number][i % ROWS]);
        }
        for (int number = layer * SIDES + side + RANKS * warp; number < count; number += RANKS * WARPS) {
            const Group& group = room.groups[number];
            uint2* list = const_cast<uint2*>(attention.list_of(first_group + number));
            const auto put = [&](int place, const Piece& piece) {
                const unsigned listed = piece.rows | (piece.columns & 255) << 8 | (piece.kind == PROMPT) << 16;
                list[1 + place] = uint2{unsigned(piece.number), listed};
            };
            const int length = list_tiles(run, group.env, room.candidates[number], group.rows, put);
            if (lane == 0) list[0].x = length;
        }
    }

    // -- A layer's part ---------------------------------------------------------------------------------------------

    __device__ float embedding(const Group& group, int token, int position, long long offset, int place) const {
        return embedded(run, group.env, token, position, offset, feature_of(place));
    }

    // What a row's warp starts from: the embedding of its token, or what the layer before left.
    __device__ Share take(const Turn& turn, const Group& group, long long offset, int job) {
        Share share{};
        if (layer > 0) {
            wait_for(&room.before.arrived, job & 1);
            for (int part = 0; part < SIDES; ++part) share.add(room.before.parts[part] + warp * SUMS);
            return share;
        }
        if (warp >= group.rows) return share;
        int token;
        if (turn.step < run.num_given) token = group.given(run, room.candidates[turn.number][warp], turn.step);
        else {
            wait_for(&room.drawn[turn.number], (turn.step - run.num_given) & 1);
            token = int(room.tokens[turn.number][warp][0]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) share.x[i] = embedding(group, token, run.start + turn.step, offset, 4 * lane + i);
        return share;
    }

    // What came in has been read by all warps: room for more.
    __device__ void free_box(const Turn& turn, const Group& group) {
        if (thread) return;
        if (layer > 0) {
            expect(&room.before.arrived, SIDES * PART);
            for (int to = 0; to < SIDES; ++to) send(room.nothing, 0.0f, 0.0f, &room.taken, (layer - 1) * SIDES + to);
        } else if (turn.step >= run.num_given) {
            expect(&room.drawn[turn.number], group.rows * 8);
        }
    }

    // A strip of queries, keys or values, each where attention looks for it.
    __device__ void put_strip(const float (&sums)[4]) {
        const int g = lane / 4, t = lane % 4, kind = warp / (QKV_STRIPS / 3), part = warp % (QKV_STRIPS / 3);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 2 * t + i % 2, feature = part * 16 + g + i / 2 * 8, head = feature / HEAD, d = feature % HEAD;
            const float value = sums[i] + room.qkv_bias[kind * OWN_WIDTH + feature];
            // Scores come out in powers of two.
            if (kind == 0) room.queries[row * OWN_STRIDE + feature] = round_to(value * (1.4426950408889634f * 0.17677669529663687f));
            else if (kind == 1) room.keys[head * HEAD_TILE + row * HEAD + d] = round_to(value);
            else room.values[head * HEAD_TILE + d * TILE + row] = round_to(value);
        }
    }

    // A row's keys and values to the current segment, where later tokens read them.
    __device__ void keep_row(const Group& group, int candidate, int row, int column) {
        const long long place = current_tile(run, group.first_row + candidate, layer, column) + side * OWN_HEADS * HEAD_TILE;
#pragma unroll
        for (int head = 0; head < OWN_HEADS; ++head) {
            const long long tile = place + head * HEAD_TILE;
            run.keys[tile + column % TILE * HEAD + lane] = room.keys[head * HEAD_TILE + row * HEAD + lane];
            run.values[tile + lane * TILE + column % TILE] = room.values[head * HEAD_TILE + lane * TILE + row];
        }
    }

    // What the layer adds goes to both sides of the next one, or to whoever draws this group's tokens.
    __device__ void pass_on(const float (&sums)[4], const Turn& turn, int job) {
        if (layer + 1 < LAYERS) {
            if (job > 0) {
                wait_for(&room.taken, (job - 1) & 1);
                if (thread == 0) expect(&room.taken, SIDES * 8);
            }
            for (int to = 0; to < SIDES; ++to)
                hand_out(sums, room.before.parts[side], &room.before.arrived, strip, (layer + 1) * SIDES + to);
            return;
        }
        const int slot = turn.step - (run.num_given - 1);
        if (slot < 0) return;
        const int drawer = turn.number % LAYERS, before = slot * num_drawn(drawer) + turn.number / LAYERS; // groups it had
        if (before > 0) {
            wait_for(&room.finished_taken[drawer], (before - 1) & 1);
            if (thread == 0) expect(&room.finished_taken[drawer], 8);
        }
        hand_out(sums, room.finished.parts[side], &room.finished.arrived, strip, drawer * SIDES);
    }

    __device__ int num_drawn(int drawer) const { return (count - drawer + LAYERS - 1) / LAYERS; } // groups a layer draws for

    __device__ void work(const Turn& turn, int job, bool kept_column, int columns, long long offset) {
        const Group& group = room.groups[turn.number];
        const int parity = job & 1;
        Turn coming = turn;
        coming.next(count);
        const uint2* next_list = attention.list_of(first_group + coming.number) + 1;
        const uint2 next_entries = attention.entry(next_list, room.num_tiles[coming.number], 0);
        Share share;
        {
            if (warp < ROWS) {
                share = take(turn, group, offset, job);
                share.normalize(room.first_norm, room.activations);
            }
            synchronize();
            free_box(turn, group);
            if (warp < QKV_STRIPS) {
                uint4 weights[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) weights[i] = room.qkv[(warp * 8 + i) * LANES + lane];
                float sums[4] = {};
                multiply(weights, room.activations, STRIDE, sums);
                put_strip(sums);
            }
        }
        synchronize();
        attention.attend(columns, kept_column);
        synchronize();
        if (half) {
            float sums[4] = {};
            multiply(kept, room.attended, OWN_STRIDE, sums);
            hand_out(sums, room.other_part[parity], &room.exchanged[parity], strip, layer * SIDES + 1 - side);
            hand_out(sums, room.own_part, &room.exchanged[parity], strip, layer * SIDES + side);
            if (kept_column && strip < group.rows) keep_row(group, room.candidates[turn.number][strip], strip, columns);
        }
        if (warp < ROWS) {
            wait_for(&room.exchanged[parity], job >> 1 & 1);
            if (thread == 0) expect(&room.exchanged[parity], SIDES * PART);
            share.add(room.own_part + warp * SUMS);
            share.add(room.other_part[parity] + warp * SUMS);
            share.add(room.out_bias);
            reinterpret_cast<float4*>(room.x + warp * SUMS)[lane] = make_float4(share.x[0], share.x[1], share.x[2], share.x[3]);
            share.normalize(room.second_norm, room.activations);
        }
        synchronize();
        attention.begin(next_list, room.num_tiles[coming.number], next_entries);
        const int g = lane / 4, t = lane % 4;
        const float* bias = room.up_bias + warp * 16 + g;
        float sums[4] = {bias[0], bias[0], bias[8], bias[8]};
        multiply(up, room.activations, STRIDE, sums);
        unsigned* hidden = reinterpret_cast<unsigned*>(room.hidden + 2 * t * HIDDEN_STRIDE + warp * 16 + 2 * g);
        hidden[0] = pack(quick_gelu(sums[0]), quick_gelu(sums[2]));
        hidden[HIDDEN_STRIDE / 2] = pack(quick_gelu(sums[1]), quick_gelu(sums[3]));
        uint4 weights[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) weights[i] = !half && i < 4 ? kept[i % 4] : room.down[strip][half ? i : 4 + i][lane];
        synchronize();
        float parts[4] = {};
        multiply(weights, room.hidden + half * (OWN_HIDDEN / 2), HIDDEN_STRIDE, parts);
        float4* other_half = reinterpret_cast<float4*>(room.halves[strip][lane]);
        if (half) *other_half = make_float4(parts[0], parts[1], parts[2], parts[3]);
        synchronize_some(1 + strip, 2 * LANES);
        if (half) return;
        const float4 more = *other_half;
        parts[0] += more.x, parts[1] += more.y, parts[2] += more.z, parts[3] += more.w;
        if (side == 0) { // one of them adds what was there before
            const float2 its_bias = *reinterpret_cast<const float2*>(room.down_bias + place_of(strip));
            const float2 even = *reinterpret_cast<const float2*>(room.x + 2 * t * SUMS + place_of(strip));
            const float2 odd = *reinterpret_cast<const float2*>(room.x + (2 * t + 1) * SUMS + place_of(strip));
            parts[0] += even.x + its_bias.x, parts[1] += odd.x + its_bias.x;
            parts[2] += even.y + its_bias.y, parts[3] += odd.y + its_bias.y;
        }
        pass_on(parts, turn, job);
    }

    // -- Drawing tokens ---------------------------------------------------------------------------------------------

    __device__ void draw_tokens(const Turn& turn, int slot, int drawn_before) {
        const Group& group = room.groups[turn.number];
        const int row = strip, candidate = room.candidates[turn.number][row];
        Tally& tally = room.tallies[turn.number / LAYERS][row];
        uint4 weights[8];
        if (!half) {
            fetch(weights, run.heads + (long long)((run.head_first + slot) % run.head_period) * VOCABULARY_ROOM * WIDTH, strip * 8);
            Share share{};
            wait_for(&room.finished.arrived, drawn_before & 1);
            for (int part = 0; part < SIDES; ++part) share.add(room.finished.parts[part] + row * SUMS);
            share.normalize(room.last_norm, room.activations);
        } else if (run.parts[Slot(run, slot).part].seeds && row < group.rows) {
            for (int token = lane; token < VOCABULARY; token += LANES)
                room.noise[row][token] = noise_of(run, tally, candidate, slot, token);
        }
        synchronize();
        if (thread == 0) {
            expect(&room.finished.arrived, SIDES * PART);
            for (int to = 0; to < SIDES; ++to)
                send(room.nothing, 0.0f, 0.0f, &room.finished_taken[layer], (LAYERS - 1) * SIDES + to);
        }
        if (!half) {
            float sums[4] = {};
            multiply(weights, room.activations, STRIDE, sums);
            float* logits = room.logits + 2 * (lane % 4) * SUMS + strip * 16 + lane / 4;
            logits[0] = sums[0], logits[SUMS] = sums[1], logits[8] = sums[2], logits[SUMS + 8] = sums[3];
        }
        synchronize();
        if (half || row >= group.rows) return;
        const auto noise = [&](int token) { return room.noise[row][token]; };
        const float token = float(conclude(run, room.logits + row * SUMS, noise, group.env, candidate, tally, slot));
        if (lane == 0 && slot + 1 < run.num_slots) {
            for (int to = 0; to < SIDES; ++to) send(room.tokens[turn.number][row], token, 0.0f, &room.drawn[turn.number], to);
        }
    }

    // -- All of it --------------------------------------------------------------------------------------------------

    __device__ void go() {
        const int num_jobs = num_steps * count;
        // A layer draws for every LAYERS-th group, when that has just left the last layer.
        const int draws_from = (count < LAYERS ? count : LAYERS) - layer, lag = draws_from < 0 ? 0 : draws_from;
        Turn turn{0, 0}, due{0, 0};
        int num_drawn_here = 0, columns = run.columns;
        bool kept_column = false;
        for (int job = 0; job < num_jobs + lag; ++job) {
            if (job >= lag) {
                const int slot = due.step - (run.num_given - 1);
                if (side == 0 && slot >= 0 && due.number % LAYERS == layer) draw_tokens(due, slot, num_drawn_here++);
                due.next(count);
            }
            if (job >= num_jobs) continue;
            if (turn.number == 0) columns += kept_column, kept_column = run.readable[run.start + turn.step];
            work(turn, job, kept_column, columns, run.offsets[run.start + turn.step]);
            turn.next(count);
        }
        // Nobody leaves while others may still write to its shared memory.
        if (layer + 1 < LAYERS) wait_for(&room.taken, (num_jobs - 1) & 1);
        else {
            for (int drawer = 0; drawer < LAYERS; ++drawer) {
                const int number = run.num_slots * num_drawn(drawer);
                if (number > 0) wait_for(&room.finished_taken[drawer], (number - 1) & 1);
            }
        }
        synchronize_cluster();
    }
};

LAUNCHED_IN_CLUSTERS(RANKS, extend)(const Run run) {
    Room& room = *reinterpret_cast<Room*>(shared_bytes);
    Line line(run, room, rank_in_cluster(), block_index / RANKS * run.each);
    line.load_weights();
    line.make_barriers();
    line.list_all();
    wait_for_groups<0>();
    synchronize_cluster(); // lists are complete, and all blocks are there before one writes to another
    for (int number = thread; number < line.count; number += THREADS)
        room.num_tiles[number] = line.attention.list_of(line.first_group + number)[0].x;
    synchronize();
    const uint2* list = line.attention.list_of(line.first_group) + 1;
    line.attention.begin(list, room.num_tiles[0], line.attention.entry(list, room.num_tiles[0], 0));
    line.load_registers();
    line.go();
}
