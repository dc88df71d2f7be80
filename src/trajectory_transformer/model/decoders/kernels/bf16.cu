// Extends every candidate by a run of slots in bfloat16, with float32 sums, on the matrix units (mma.m16n8k16).
//
// Two blocks work together (a cluster): each has half of the heads and of the hidden units, for the same up to ROWS
// candidates. After attention and after the perceptron they exchange their parts of the sums through each other's shared
// memory; the rest (norms, drawing) each does for itself. So a block reads half of the weights only, and these are on
// their way into registers while it is busy with something else.
//
// Weights are the left factor (16 outputs, a strip, x 16 inputs), candidates the right one (16 inputs x 8 rows). The
// order of inputs within 32 is free as long as both factors agree: lane t of four takes inputs 8t .. 8t + 7, so that each
// of its loads is 16 bytes wide. Weights are laid out by the caller in the order in which lanes read them.

constexpr int RANKS = 2;
constexpr int VECTORS = 13 * WIDTH; // of a layer: norm, biases of queries, keys and values, of `out`; norm, `up`, `down`
constexpr int OWN_HEADS = HEADS / RANKS, OWN_WIDTH = WIDTH / RANKS, OWN_HIDDEN = 4 * WIDTH / RANKS; // of one block
// Strides that keep the banks of shared memory apart.
constexpr int STRIDE = WIDTH + 32, OWN_STRIDE = OWN_WIDTH + 32, HIDDEN_STRIDE = OWN_HIDDEN + 32, SUMS = WIDTH + 4;
constexpr int SPLITS = WARPS / OWN_HEADS; // warps that share a head's columns
constexpr int AHEAD = 3;                  // tiles that a warp has on their way
constexpr int HEAD_TILE = TILE * HEAD;
constexpr int PER_RANK = 12 * WIDTH * WIDTH / RANKS, OUT_PLACE = 3 * OWN_WIDTH * WIDTH, UP_PLACE = OUT_PLACE + WIDTH * OWN_WIDTH,
              DOWN_PLACE = UP_PLACE + OWN_HIDDEN * WIDTH;
constexpr int QKV_STRIPS = 3 * OWN_WIDTH / 16; // 12: one for each of as many warps
static_assert(HEADS == 4 && HEAD == 32 && VOCABULARY <= 128, "see why_not_fused");

struct Room { // shared memory of a block
    alignas(128) Number tiles[WARPS][AHEAD][2][HEAD_TILE];
    float x[ROWS * WIDTH];
    alignas(16) Number activations[ROWS * STRIDE];
    alignas(16) Number queries[ROWS * OWN_STRIDE];
    alignas(16) Number attended[ROWS * OWN_STRIDE];
    alignas(16) Number hidden[ROWS * HIDDEN_STRIDE];
    alignas(16) float after_attention[RANKS][ROWS * SUMS];      // parts of sums from both blocks
    alignas(16) float after_perceptron[2 * RANKS][ROWS * SUMS]; // each in two halves
    Barrier arrived[2];                                         // all parts are there
    float tops[WARPS][ROWS], totals[WARPS][ROWS], found[WARPS][ROWS][HEAD];
    float logits[ROWS * SUMS];
    float vectors[LAYERS * VECTORS + 2 * WIDTH];
    int candidates[ROWS], tokens[ROWS];
    Tally tallies[ROWS];
    int num_tiles;
};

__device__ Number round_to(float value) { return Number(pack(value, 0.0f)); }

// Within 2e-7 of the exact one: erf approximated as by Hastings (Abramowitz and Stegun, 7.1.26).
__device__ float quick_gelu(float value) {
    const float x = fabsf(value) * 0.70710678f;
    const float t = __fdividef(1.0f, 1.0f + 0.3275911f * x);
    const float rest = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    return 0.5f * value * (1.0f + copysignf(1.0f - rest * exp2f(-1.4426950408889634f * x * x), value));
}

// Asks memory for a lane's share of one strip of a matrix: two loads for every 32 inputs.
template <int COUNT> __device__ void fetch(uint4 (&numbers)[8], const Number* matrix, int strip) {
    const uint4* place = reinterpret_cast<const uint4*>(matrix) + strip * COUNT * LANES + thread % LANES;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        numbers[i] = load_once(place + i * LANES);
}

// One strip of a product: rows [ROWS][stride] -> sums of outputs g (0, 1) and g + 8 (2, 3) for candidates 2t and 2t + 1.
template <int COUNT> __device__ void multiply(const uint4 (&numbers)[8], const Number* rows, int stride, float (&sums)[4]) {
    const int lane = thread % LANES, g = lane / 4, t = lane % 4;
    float more[4] = {};
#pragma unroll
    for (int pair = 0; pair < COUNT / 2; ++pair) {
        const uint4 b = *reinterpret_cast<const uint4*>(rows + g * stride + pair * 32 + 8 * t);
        const uint4 first = numbers[2 * pair], second = numbers[2 * pair + 1];
        multiply_add(sums, first.x, first.y, first.z, first.w, b.x, b.y);
        multiply_add(more, second.x, second.y, second.z, second.w, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += more[i];
}

// Puts a strip's parts of sums where both blocks find them, outputs g and g + 8 side by side. The bytes are counted by
// the barrier of whoever gets them, so that nothing else has to be waited for.
__device__ void hand_out(const float (&sums)[4], float* buffer, Barrier* barrier, int strip) {
    const int lane = thread % LANES, g = lane / 4, t = lane % 4;
    float* place = buffer + 2 * t * SUMS + strip * 16 + 2 * g;
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) {
        send(place, sums[0], sums[2], barrier, rank);
        send(place + SUMS, sums[1], sums[3], barrier, rank);
    }
}

// x += the parts of sums + bias, where given, then the layer norm of x. A warp for each candidate.
template <int COUNT> __device__ void add_and_normalize(Room& room, const float (*parts)[ROWS * SUMS], const float* bias, const float* norm) {
    constexpr int EACH = WIDTH / LANES;
    const int lane = thread % LANES, row = thread / LANES;
    if (row >= ROWS) return;
    float own[EACH], sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int f = lane + i * LANES, place = (f & ~15) + (f % 8) * 2 + f / 8 % 2; // as handed out
        own[i] = room.x[row * WIDTH + f];
        if (COUNT) {
            own[i] += bias[f];
#pragma unroll
            for (int part = 0; part < COUNT; ++part) own[i] += parts[part][row * SUMS + place];
            room.x[row * WIDTH + f] = own[i];
        }
        sum += own[i];
    }
    const float mean = warp_sum(sum) / WIDTH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares += (own[i] - mean) * (own[i] - mean);
    const float scale = rsqrtf(warp_sum(squares) / WIDTH + 1e-5f);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int f = lane + i * LANES;
        room.activations[row * STRIDE + f] = round_to((own[i] - mean) * scale * norm[f] + norm[WIDTH + f]);
    }
}

// A strip of queries to shared memory, or of keys or values to the current segment, where later tokens read them.
__device__ void keep_strip(const Run& run, Room& room, const float (&sums)[4], const float* bias, int strip, int rank, int layer,
                           int column, long long first_row, int rows) {
    const int lane = thread % LANES, g = lane / 4, t = lane % 4, kind = strip / (QKV_STRIPS / 3), part = strip % (QKV_STRIPS / 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 2 * t + i % 2, feature = part * 16 + g + i / 2 * 8, head = feature / HEAD, d = feature % HEAD;
        const float value = sums[i] + bias[kind * WIDTH + rank * OWN_WIDTH + feature];
        // Scores come out in powers of two.
        if (kind == 0) room.queries[row * OWN_STRIDE + feature] = round_to(value * (1.4426950408889634f * 0.17677669529663687f));
        else if (column >= 0 && row < rows) {
            const long long tile = current_tile(run, first_row + room.candidates[row], layer, column) + (rank * OWN_HEADS + head) * HEAD_TILE;
            if (kind == 1) run.keys[tile + column % TILE * HEAD + d] = round_to(value);
            else run.values[tile + d * TILE + column % TILE] = round_to(value);
        }
    }
}

// The tiles of one warp on their way from memory: those of one head, shared out among SPLITS warps.
struct Attention {
    const Tile* tiles;
    int num_tiles, num_old; // the last ones, of the segment being written, are not complete before its keys are
    Number (*room)[2][HEAD_TILE];
    int rank, asked;

    __device__ void ask(int layer) {
        const int warp = thread / LANES, lane = thread % LANES, index = warp / OWN_HEADS + asked * SPLITS;
        if (index < num_tiles) {
            const Tile tile = tiles[index];
            const long long from = layer * tile.layer_stride + (rank * OWN_HEADS + warp % OWN_HEADS) * HEAD_TILE + 8 * lane;
            Number* into = &room[asked % AHEAD][0][8 * lane];
#pragma unroll
            for (int i = 0; i < 4; ++i) begin_copy(into + i * 256, (i < 2 ? tile.keys : tile.values) + from + i % 2 * 256);
        }
        end_group();
        ++asked;
    }

    // Asks for the first tiles of a layer as soon as they are complete, which most are before its keys are known.
    __device__ void begin(int layer, bool keys_known) {
        const bool early = thread / LANES / OWN_HEADS + (AHEAD - 1) * SPLITS < num_old;
        if (early == keys_known) return;
        asked = 0;
        for (int i = 0; i < AHEAD; ++i) ask(layer);
    }

    __device__ void attend(Room& all, int layer, int columns) {
        const int warp = thread / LANES, lane = thread % LANES, g = lane / 4, t = lane % 4;
        const int head = warp % OWN_HEADS;
        const uint4 q = *reinterpret_cast<const uint4*>(all.queries + g * OWN_STRIDE + head * HEAD + 8 * t);
        float highest = LOWEST, total = 0.0f, found[4][4] = {};
        begin(layer, true);
        int stage = 0;
        for (int index = warp / OWN_HEADS; index < num_tiles; index += SPLITS) {
            wait_for_groups<AHEAD - 1>();
            __syncwarp();
            // Columns are dealt out so that lane t ends up with the scores of 4t .. 4t + 3.
            const Number* keys = &room[stage][0][(4 * (g / 2) + g % 2) * HEAD + 8 * t];
            const Number* values = &room[stage][1][g * TILE + 4 * t];
            const uint4 first_keys = *reinterpret_cast<const uint4*>(keys);
            const uint4 second_keys = *reinterpret_cast<const uint4*>(keys + 2 * HEAD);
            uint2 value[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) value[j] = *reinterpret_cast<const uint2*>(values + 8 * j * TILE);
            const int valid = tiles[index].rows >> g & 1 ? valid_columns(tiles[index], columns) - 4 * t : 0;
            __syncwarp();
            ask(layer);
            if (++stage == AHEAD) stage = 0;
            float low[4] = {}, high[4] = {}; // scores of columns 4t, 4t + 1 and of 4t + 2, 4t + 3
            multiply_add(low, q.x, 0, q.y, 0, first_keys.x, first_keys.y);
            multiply_add(high, q.x, 0, q.y, 0, second_keys.x, second_keys.y);
            multiply_add(low, q.z, 0, q.w, 0, first_keys.z, first_keys.w);
            multiply_add(high, q.z, 0, q.w, 0, second_keys.z, second_keys.w);
            const float s0 = valid > 0 ? low[0] : LOWEST, s1 = valid > 1 ? low[1] : LOWEST;
            const float s2 = valid > 2 ? high[0] : LOWEST, s3 = valid > 3 ? high[1] : LOWEST;
            float higher = fmaxf(fmaxf(s0, s1), fmaxf(s2, s3));
            higher = fmaxf(higher, from_lane(higher, 1));
            higher = fmaxf(highest, fmaxf(higher, from_lane(higher, 2)));
            const float shrink = exp2f(highest - higher);
            const float p0 = valid > 0 ? exp2f(s0 - higher) : 0.0f, p1 = valid > 1 ? exp2f(s1 - higher) : 0.0f;
            const float p2 = valid > 2 ? exp2f(s2 - higher) : 0.0f, p3 = valid > 3 ? exp2f(s3 - higher) : 0.0f;
            total = total * shrink + ((p0 + p1) + (p2 + p3));
            highest = higher;
            const unsigned first = pack(p0, p1), second = pack(p2, p3);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                found[j][0] *= shrink, found[j][1] *= shrink;
                multiply_add(found[j], first, 0, second, 0, value[j].x, value[j].y);
            }
        }
        total += from_lane(total, 1);
        total += from_lane(total, 2);
        if (t == 0) all.tops[warp][g] = highest, all.totals[warp][g] = total;
#pragma unroll
        for (int j = 0; j < 4; ++j) *reinterpret_cast<float2*>(&all.found[warp][g][8 * j + 2 * t]) = make_float2(found[j][0], found[j][1]);
        synchronize();
        const int row = thread / OWN_WIDTH, feature = thread % OWN_WIDTH; // each thread puts one number together
        static_assert(THREADS == ROWS * OWN_WIDTH, "a thread for each number");
        float top = LOWEST, whole = 0.0f, sum = 0.0f;
#pragma unroll
        for (int s = feature / HEAD; s < WARPS; s += OWN_HEADS) top = fmaxf(top, all.tops[s][row]);
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
            const int s = i * OWN_HEADS + feature / HEAD;
            const float weight = exp2f(all.tops[s][row] - top);
            whole += weight * all.totals[s][row];
            sum += weight * all.found[s][row][feature % HEAD];
        }
        all.attended[row * OWN_STRIDE + feature] = round_to(whole > 0.0f ? __fdividef(sum, whole) : 0.0f);
    }
};

LAUNCHED_IN_CLUSTERS(RANKS, extend)(const Run run) {
    Room& room = *reinterpret_cast<Room*>(shared_bytes);
    Tile* tiles = reinterpret_cast<Tile*>(shared_bytes + ROOM_BYTES(Room));
    const int rank = rank_in_cluster();
    const Group group(run, block_index / RANKS, room.candidates, room.tokens, room.tallies);
    const int env = group.env, rows = group.rows;
    const long long first_row = group.first_row;
    const int warp = thread / LANES, g = thread % LANES / 4, t = thread % 4, strip = warp % 8, half = warp / 8;
    const Number* weights = run.weights + (long long)rank * PER_RANK;
    const auto of_layer = [&](int layer) { return weights + (long long)layer * RANKS * PER_RANK; };
    uint4 a[8], b[8]; // weights on their way: queries, keys, values, `up` and heads in turn, and `out` and `down` in turn
    if (warp < QKV_STRIPS) fetch<8>(a, weights, warp);
    if (warp == WARPS - 1) {
        const int length = list_tiles(run, env, room.candidates, rows, tiles);
        if (thread % LANES == 0) room.num_tiles = length;
    }
    if (thread == 0) {
        for (int i = 0; i < 2; ++i) make_barrier(&room.arrived[i]);
    }
    for (int i = thread; i < LAYERS * VECTORS + 2 * WIDTH; i += THREADS) room.vectors[i] = run.vectors[i];
    synchronize_cluster(); // both blocks must be there before one writes to the other
    Attention attention{tiles, room.num_tiles, room.num_tiles - rows * run.tiles, room.tiles[warp], rank, 0};
    int columns = run.columns;
    unsigned parity = 0;

    const int num_steps = run.num_given - 1 + run.num_slots;
    long long offset = run.offsets[run.start]; // of the next token to read
    bool readable = run.readable[run.start];
    for (int step = 0; step < num_steps; ++step) {
        const int position = run.start + step, slot = step - (run.num_given - 1);
        const bool kept = readable;
#pragma unroll
        for (int place = thread; place < ROWS * WIDTH; place += THREADS)
            room.x[place] = embedded(run, env, room.tokens[place / WIDTH], position, offset, place % WIDTH);
        if (step + 1 < num_steps) offset = run.offsets[position + 1], readable = run.readable[position + 1];
        synchronize();
        add_and_normalize<0>(room, nullptr, nullptr, room.vectors);
        const int column = kept ? columns : -1;
        columns += kept;
        synchronize();
        for (int layer = 0; layer < LAYERS; ++layer) {
            const float* vectors = room.vectors + layer * VECTORS;
            attention.begin(layer, false);
            if (warp < QKV_STRIPS) {
                float sums[4] = {};
                multiply<8>(a, room.activations, STRIDE, sums);
                keep_strip(run, room, sums, vectors + 2 * WIDTH, warp, rank, layer, column, first_row, rows);
            }
            fetch<8>(a, of_layer(layer) + UP_PLACE, warp);
            if (half) fetch<4>(b, of_layer(layer) + OUT_PLACE, strip);
            synchronize();
            attention.attend(room, layer, columns);
            if (thread == 0) expect(&room.arrived[0], RANKS * ROWS * WIDTH * 4);
            synchronize();
            if (half) {
                float sums[4] = {};
                multiply<4>(b, room.attended, OWN_STRIDE, sums);
                hand_out(sums, room.after_attention[rank], &room.arrived[0], strip);
            }
            fetch<8>(b, of_layer(layer) + DOWN_PLACE + half * (WIDTH * OWN_HIDDEN / 2), strip);
            wait_for(&room.arrived[0], parity);
            add_and_normalize<RANKS>(room, room.after_attention, vectors + 5 * WIDTH, vectors + 6 * WIDTH);
            synchronize();
            const float* bias = vectors + 8 * WIDTH + rank * OWN_HIDDEN + warp * 16 + g;
            float sums[4] = {bias[0], bias[0], bias[8], bias[8]};
            multiply<8>(a, room.activations, STRIDE, sums);
            if (layer + 1 < LAYERS) {
                if (warp < QKV_STRIPS) fetch<8>(a, of_layer(layer + 1), warp);
            } else if (slot >= 0 && !half) {
                fetch<8>(a, run.heads + (long long)((run.head_first + slot) % run.head_period) * VOCABULARY_ROOM * WIDTH, strip);
            }
            unsigned* hidden = reinterpret_cast<unsigned*>(room.hidden + 2 * t * HIDDEN_STRIDE + warp * 16 + 2 * g);
            hidden[0] = pack(quick_gelu(sums[0]), quick_gelu(sums[2]));
            hidden[HIDDEN_STRIDE / 2] = pack(quick_gelu(sums[1]), quick_gelu(sums[3]));
            if (thread == 0) expect(&room.arrived[1], 2 * RANKS * ROWS * WIDTH * 4);
            synchronize();
            float parts[4] = {};
            multiply<8>(b, room.hidden + half * (OWN_HIDDEN / 2), HIDDEN_STRIDE, parts);
            hand_out(parts, room.after_perceptron[2 * rank + half], &room.arrived[1], strip);
            wait_for(&room.arrived[1], parity);
            parity ^= 1;
            add_and_normalize<2 * RANKS>(room, room.after_perceptron, vectors + 12 * WIDTH, vectors + 13 * WIDTH); // the next norm
            synchronize();
        }
        if (slot < 0) {
            if (warp < QKV_STRIPS) fetch<8>(a, weights, warp);
            for (int row = thread; row < rows; row += THREADS)
                room.tokens[row] = int(run.given[(first_row + room.candidates[row]) * run.given_room + step + 1]);
            synchronize();
            continue;
        }
        if (!half) {
            float sums[4] = {};
            multiply<8>(a, room.activations, STRIDE, sums);
            float* logits = room.logits + 2 * t * SUMS + strip * 16 + g;
            logits[0] = sums[0], logits[SUMS] = sums[1], logits[8] = sums[2], logits[SUMS + 8] = sums[3];
        }
        if (warp < QKV_STRIPS) fetch<8>(a, weights, warp); // of the next token
        synchronize();
        if (warp < rows) {
            const int token = conclude(run, room.logits + warp * SUMS, env, room.candidates[warp], room.tallies[warp], slot, rank == 0);
            if (thread % LANES == 0) room.tokens[warp] = token;
        }
        synchronize();
    }
}
