// Extends every candidate by a run of slots in bfloat16, with float32 sums, on the matrix units.
//
// Two blocks work together (a cluster): each has half of the heads and of the hidden units, for the same up to ROWS
// candidates. After attention and after the perceptron they exchange their parts of the sums through each other's shared
// memory; the rest (norms, drawing) each does for itself. So a block reads half of the weights only, and these are on
// their way into registers while it is busy with something else.

// A strip of queries, keys or values, each where attention looks for it.
__device__ void put_strip(Room& room, float (&sums)[4], const float* bias, int strip, int rank) {
    const int g = own_lane() / 4, t = own_lane() % 4, kind = strip / (QKV_STRIPS / 3), feature = strip % (QKV_STRIPS / 3) * 16 + g;
    const int head = feature / HEAD, d = feature % HEAD;
    bias += kind * WIDTH + rank * OWN_WIDTH + feature;
    sums[0] += bias[0], sums[1] += bias[0], sums[2] += bias[8], sums[3] += bias[8];
    if (kind == 0) {
        constexpr float SCALE = 1.4426950408889634f * 0.17677669529663687f; // scores come out in powers of two
        Number* queries = room.queries + 2 * t * OWN_STRIDE + feature;
        queries[0] = round_to(sums[0] * SCALE), queries[OWN_STRIDE] = round_to(sums[1] * SCALE);
        queries[8] = round_to(sums[2] * SCALE), queries[OWN_STRIDE + 8] = round_to(sums[3] * SCALE);
    } else if (kind == 1) {
        Number* keys = room.keys + head * HEAD_TILE + key_place(2 * t, d); // the next column is 32 further, d + 8 is 8 further
        keys[0] = round_to(sums[0]), keys[32] = round_to(sums[1]), keys[8] = round_to(sums[2]), keys[40] = round_to(sums[3]);
    } else { // the next column is next to it, then d + 8
        unsigned* values = reinterpret_cast<unsigned*>(room.values + head * HEAD_TILE + value_place(2 * t, d));
        values[0] = pack(sums[0], sums[1]), values[1] = pack(sums[2], sums[3]);
    }
}

// A row's keys and values to the current segment, where later tokens read them. One warp.
__device__ void keep_row(const Run& run, const Room& room, int row, int layer, int column, int rank) {
    const int lane = own_lane();
    const long long place = current_tile(run, room.group.first_row + room.candidates[row], layer, column) + rank * OWN_HEADS * HEAD_TILE;
#pragma unroll
    for (int head = 0; head < OWN_HEADS; ++head) {
        const long long tile = place + head * HEAD_TILE;
        run.keys[tile + key_place(column % TILE, lane)] = room.keys[head * HEAD_TILE + key_place(row, lane)];
        run.values[tile + value_place(column % TILE, lane)] = room.values[head * HEAD_TILE + value_place(row, lane)];
    }
}

// A strip of hidden units. What is called in between may use the registers of the weights again.
template <typename Then> __device__ void put_hidden(Room& room, const uint4 (&up)[8], const float* bias, Then then) {
    const int g = own_lane() / 4, t = own_lane() % 4, first = own_warp() * 16;
    float sums[4] = {bias[first + g], bias[first + g], bias[first + g + 8], bias[first + g + 8]};
    multiply<8>(up, room.activations, STRIDE, sums);
    then();
    unsigned* hidden = reinterpret_cast<unsigned*>(room.hidden + 2 * t * HIDDEN_STRIDE + first + 2 * g);
    hidden[0] = pack(quick_gelu(sums[0]), quick_gelu(sums[2]));
    hidden[HIDDEN_STRIDE / 2] = pack(quick_gelu(sums[1]), quick_gelu(sums[3]));
}

// Biases and norms as they are read: those of queries, keys, values and `up` in their order, others as handed out.
__device__ float vector_at(const Run& run, int i) {
    const int kind = i / WIDTH % (VECTORS / WIDTH);
    const bool plain = i < LAYERS * VECTORS && ((kind >= 2 && kind < 5) || (kind >= 8 && kind < 12));
    return run.vectors[i / WIDTH * WIDTH + (plain ? i % WIDTH : feature_of(i % WIDTH))];
}

// Asks for weights of this block's half of a layer.
struct Weights {
    const Number* all;
    int rank;
    uint4 a[8], b[8]; // on their way: queries, keys, values, `up` and heads in turn, and `out` and `down` in turn

    __device__ const Number* of(int layer) const { return all + ((long long)layer * RANKS + rank) * PER_RANK; }
    __device__ const Number* down_of(int layer) const { return of(layer) + DOWN_PLACE + own_half() * (WIDTH * OWN_HIDDEN / 2); }

    __device__ void fetch_qkv(int layer) {
        if (own_warp() < QKV_STRIPS) fetch<0, 8>(a, of(layer), own_warp() * 8);
    }
    __device__ void fetch_up(int layer) { fetch<0, 8>(a, of(layer) + UP_PLACE, own_warp() * 8); }
    __device__ void fetch_head(const Number* head) { fetch<0, 8>(a, head, own_strip() * 8); }

    // `out`, and what of `down` there is room for before `out` is done with.
    __device__ void fetch_out(int layer) {
        if (own_half()) fetch<0, 4>(b, of(layer) + OUT_PLACE, own_strip() * 4), fetch<4, 4>(b, down_of(layer), own_strip() * 8);
        else fetch<0, 8>(b, down_of(layer), own_strip() * 8);
    }
    __device__ void fetch_rest_of_down(int layer) { fetch<0, 4>(b, down_of(layer), own_strip() * 8); }
};

LAUNCHED_IN_CLUSTERS(RANKS, extend)(const Run run) {
    Room& room = *reinterpret_cast<Room*>(shared_bytes);
    Tile* tiles = reinterpret_cast<Tile*>(shared_bytes + ROOM_BYTES(Room));
    const int rank = rank_in_cluster();
    Weights weights{run.weights, rank};
    weights.fetch_qkv(0);
    weights.fetch_out(0);
    if (thread < ROWS) {
        const Group group(run, block_index / RANKS);
        const int candidate = group.candidate(run, thread);
        room.candidates[thread] = candidate;
        room.tallies[thread] = group.tally(run, candidate);
        if (thread == 0) room.group = group;
    }
    if (thread == 0) {
        for (int i = 0; i < 2; ++i) make_barrier(&room.arrived[i]);
    }
    synchronize();
    const Group& group = room.group;
    if (own_warp() == WARPS - 1) {
        const int length = list_tiles(run, group.env, room.candidates, group.rows, tiles);
        if (own_lane() == 0) room.num_tiles = length;
    }
    for (int i = thread; i < LAYERS * VECTORS + 2 * WIDTH; i += THREADS) room.vectors[i] = vector_at(run, i);
    for (int i = thread; i < OWN_HEADS * HEAD_TILE; i += THREADS) room.keys[i] = room.values[i] = 0;
    synchronize_cluster(); // both blocks must be there before one writes to the other
    Attention attention{room, tiles, room.num_tiles, rank};
    attention.begin(0);
    int columns = run.columns;
    unsigned parity = 0;

    const int num_steps = run.num_given - 1 + run.num_slots;
    const auto real = [&] { return own_row() < group.rows; }; // there may be fewer candidates than rows
    int token = real() ? group.given(run, room.candidates[own_row()], 0) : 0;
    for (int step = 0; step < num_steps; ++step) {
        const int position = run.start + step, slot = step - (run.num_given - 1);
        const bool kept = run.readable[position], last_step = step + 1 == num_steps;
        Share share{};
        if (has_row()) {
            if (real()) share.embed(run, group.env, token, position);
            share.normalize(room.vectors, room.activations);
        }
        synchronize();
        for (int layer = 0; layer < LAYERS; ++layer) {
            const bool last_layer = layer + 1 == LAYERS;
            const int next_layer = last_layer ? 0 : layer + 1;
            const float* vectors = room.vectors + layer * VECTORS;
            if (own_warp() < QKV_STRIPS) {
                float sums[4] = {};
                multiply<8>(weights.a, room.activations, STRIDE, sums);
                put_strip(room, sums, vectors + 2 * WIDTH, own_warp(), rank);
            }
            weights.fetch_up(layer);
            synchronize();
            if (own_half() && kept && real()) keep_row(run, room, own_row(), layer, columns, rank);
            attention.attend(layer, columns, kept);
            synchronize();
            // Tiles of the next layer are asked for by whoever has nothing else to do.
            const bool goes_on = !last_layer || !last_step;
            if (Attention::combines()) attention.combine();
            else if (goes_on) attention.begin(next_layer);
            if (thread == 0) expect(&room.arrived[0], PART);
            synchronize();
            if (own_half()) {
                float sums[4] = {};
                multiply<4>(weights.b, room.attended, OWN_STRIDE, sums);
                hand_out(sums, room.after_attention[rank], &room.arrived[0], own_strip(), rank);
            }
            if (Attention::combines() && goes_on) attention.begin(next_layer);
            synchronize();
            if (has_row()) {
                share.exchange<1>(room.after_attention, vectors + 5 * WIDTH, &room.arrived[0], parity, rank);
                share.normalize(vectors + 6 * WIDTH, room.activations);
            } else weights.fetch_rest_of_down(layer);
            synchronize();
            put_hidden(room, weights.a, vectors + 8 * WIDTH + rank * OWN_HIDDEN, [&] {
                if (last_layer && slot >= 0 && has_row())
                    weights.fetch_head(run.heads + (long long)((run.head_first + slot) % run.head_period) * VOCABULARY_ROOM * WIDTH);
                else weights.fetch_qkv(next_layer);
            });
            if (thread == 0) expect(&room.arrived[1], 2 * PART);
            synchronize();
            float parts[4] = {};
            multiply<8>(weights.b, room.hidden + own_half() * (OWN_HIDDEN / 2), HIDDEN_STRIDE, parts);
            hand_out(parts, room.after_perceptron[2 * rank + own_half()], &room.arrived[1], own_strip(), rank);
            synchronize();
            weights.fetch_out(next_layer);
            if (has_row()) {
                share.exchange<2>(room.after_perceptron, vectors + 12 * WIDTH, &room.arrived[1], parity, rank);
                share.normalize(vectors + 13 * WIDTH, room.activations); // the next layer's, or the last
            }
            parity ^= 1;
            synchronize();
        }
        columns += kept;
        if (slot < 0) {
            if (real()) token = group.given(run, room.candidates[own_row()], step + 1);
            continue;
        }
        if (has_row()) {
            float sums[4] = {};
            multiply<8>(weights.a, room.activations, STRIDE, sums);
            float* logits = room.logits + own_lane() % 4 * 2 * SUMS + own_strip() * 16 + own_lane() / 4;
            logits[0] = sums[0], logits[SUMS] = sums[1], logits[8] = sums[2], logits[SUMS + 8] = sums[3];
            weights.fetch_qkv(0); // of the next token
        } else if (real() && run.parts[Slot(run, slot).part].seeds) { // who has no row makes the noise meanwhile
            for (int i = own_lane(); i < VOCABULARY; i += LANES)
                room.noise[own_row()][i] = noise_of(run, room.tallies[own_row()], room.candidates[own_row()], slot, i);
        }
        synchronize();
        if (has_row() && real()) {
            const int row = own_row();
            const auto noise = [&](int i) { return room.noise[row][i]; };
            token = conclude(run, room.logits + row * SUMS, noise, group.env, room.candidates[row], room.tallies[row], slot, rank == 0);
        }
    }
}
