// Extends every candidate by a run of slots in float32: read a token, draw the next, without leaving the kernel.
//
// One block has up to ROWS candidates of one environment. Candidates are independent between two selections, so blocks
// never wait for each other. Plain loops: this is the exact one, bf16.cu the fast one.

constexpr int RANKS = 1; // blocks that work together
constexpr int PER_LAYER = 12 * WIDTH * WIDTH;
constexpr int VECTORS = 13 * WIDTH; // of a layer: norm, biases of queries, keys and values, of `out`; norm, `up`, `down`
constexpr int HIDDEN = 4 * WIDTH;
constexpr int RESULTS = HIDDEN > VOCABULARY_ROOM ? HIDDEN : VOCABULARY_ROOM; // stride of a row of results

struct Room { // shared memory of a block
    float x[ROWS * WIDTH];
    float activations[ROWS * WIDTH];
    float queries[ROWS * WIDTH];
    float hidden[ROWS * HIDDEN];
    float results[ROWS * RESULTS];
    int candidates[ROWS], tokens[ROWS];
    Tally tallies[ROWS];
    int num_tiles;
};

// weights [IN, OUT], rows [ROWS][IN] -> results [ROWS][RESULTS]
template <int OUT, int IN> __device__ void multiply(const float* weights, const float* rows, float* results) {
    for (int out = thread; out < OUT; out += THREADS) {
        float sums[ROWS] = {};
        for (int in = 0; in < IN; ++in) {
            const float weight = weights[in * OUT + out];
            for (int row = 0; row < ROWS; ++row) sums[row] += weight * rows[row * IN + in];
        }
        for (int row = 0; row < ROWS; ++row) results[row * RESULTS + out] = sums[row];
    }
}

// x += results + bias where given, then the layer norm of x as the next product's input. A warp for each candidate.
__device__ void add_and_normalize(Room& room, const float* bias, const float* norm) {
    const int lane = thread % LANES;
    for (int row = thread / LANES; row < ROWS; row += WARPS) {
        float* x = room.x + row * WIDTH;
        float sum = 0.0f, squares = 0.0f;
        for (int i = lane; i < WIDTH; i += LANES) {
            if (bias) x[i] += room.results[row * RESULTS + i] + bias[i];
            sum += x[i];
        }
        const float mean = warp_sum(sum) / WIDTH;
        for (int i = lane; i < WIDTH; i += LANES) squares += (x[i] - mean) * (x[i] - mean);
        const float scale = 1.0f / sqrtf(warp_sum(squares) / WIDTH + 1e-5f);
        for (int i = lane; i < WIDTH; i += LANES)
            room.activations[row * WIDTH + i] = (x[i] - mean) * scale * norm[i] + norm[WIDTH + i];
    }
}

// Queries to shared memory, keys and values to the current segment, where later tokens read them.
__device__ void keep_keys(const Run& run, Room& room, const float* bias, int layer, int column, long long first_row, int rows) {
    for (int place = thread; place < ROWS * WIDTH; place += THREADS) {
        const int row = place / WIDTH, feature = place % WIDTH, head = feature / HEAD, d = feature % HEAD;
        const float* result = room.results + row * RESULTS + feature;
        room.queries[place] = (result[0] + bias[feature]) / sqrtf(float(HEAD));
        if (row >= rows || column < 0) continue;
        const long long tile = current_tile(run, first_row + room.candidates[row], layer, column);
        run.keys[tile + (head * TILE + column % TILE) * HEAD + d] = result[WIDTH] + bias[WIDTH + feature];
        run.values[tile + (head * HEAD + d) * TILE + column % TILE] = result[2 * WIDTH] + bias[2 * WIDTH + feature];
    }
}

// queries [ROWS][WIDTH] -> attended [ROWS][WIDTH]; each warp takes candidates and heads in turn. A candidate's tiles are
// dealt out to lanes by their place among its own, so that copies of a candidate come out the same to the last bit.
__device__ void attend(const Tile* tiles, int num_tiles, int layer, int columns, const float* queries, float* attended) {
    constexpr int AT_ONCE = LANES < TILE ? 1 : LANES / TILE, STEP = LANES / AT_ONCE; // tiles, and lanes of each
    const int lane = thread % LANES;
    for (int pair = thread / LANES; pair < ROWS * HEADS; pair += WARPS) {
        const int row = pair / HEADS, head = pair % HEADS;
        const float* query = queries + row * WIDTH + head * HEAD;
        float highest = LOWEST, total = 0.0f, found[HEAD] = {};
        for (int index = 0, own = 0; index < num_tiles; ++index) {
            const Tile tile = tiles[index];
            if (!(tile.rows >> row & 1) || own++ % AT_ONCE != lane / STEP) continue;
            for (int column = lane % STEP; column < valid_columns(tile.columns, columns); column += STEP) {
                const long long from = (long long)(layer * tile.tiles_of_layer) * (WIDTH * TILE);
                const float* key = tile.keys + from + (head * TILE + column) * HEAD;
                const float* value = tile.values + from + head * HEAD * TILE + column;
                float score = 0.0f;
                for (int d = 0; d < HEAD; ++d) score += query[d] * key[d];
                const float higher = fmaxf(highest, score), shrink = expf(highest - higher), share = expf(score - higher);
                total = total * shrink + share;
                for (int d = 0; d < HEAD; ++d) found[d] = found[d] * shrink + share * value[d * TILE];
                highest = higher;
            }
        }
        const float top = warp_max(highest), shrink = expf(highest - top);
        total = warp_sum(total * shrink);
        for (int d = 0; d < HEAD; ++d) {
            const float sum = warp_sum(found[d] * shrink);
            if (d % LANES == lane) attended[row * WIDTH + head * HEAD + d] = total > 0.0f ? sum / total : 0.0f;
        }
    }
}

LAUNCHED(extend)(const Run run) {
    Room& room = *reinterpret_cast<Room*>(shared_bytes);
    Tile* tiles = reinterpret_cast<Tile*>(shared_bytes + ROOM_BYTES(Room));
    const Group group(run, block_index / RANKS);
    for (int row = thread; row < ROWS; row += THREADS) {
        room.candidates[row] = group.candidate(run, row);
        room.tokens[row] = row < group.rows ? group.given(run, room.candidates[row], 0) : 0;
        room.tallies[row] = group.tally(run, room.candidates[row]);
    }
    synchronize();
    const int env = group.env, rows = group.rows;
    const long long first_row = group.first_row;
    if (thread < LANES) {
        const int length = list_tiles(run, env, room.candidates, rows, tiles);
        if (thread == 0) room.num_tiles = length;
    }
    synchronize();
    const int num_tiles = room.num_tiles;
    int columns = run.columns;

    for (int step = 0; step < run.num_given - 1 + run.num_slots; ++step) {
        const int position = run.start + step, slot = step - (run.num_given - 1);
        for (int place = thread; place < ROWS * WIDTH; place += THREADS)
            room.x[place] = embedded(run, env, room.tokens[place / WIDTH], position, run.offsets[position], place % WIDTH);
        synchronize();
        add_and_normalize(room, nullptr, run.vectors);
        synchronize();
        const bool kept = run.readable[position];
        const int column = kept ? columns : -1;
        columns += kept;
        for (int layer = 0; layer < LAYERS; ++layer) {
            const float* weights = run.weights + (long long)layer * PER_LAYER;
            const float* vectors = run.vectors + layer * VECTORS;
            multiply<3 * WIDTH, WIDTH>(weights, room.activations, room.results);
            synchronize();
            keep_keys(run, room, vectors + 2 * WIDTH, layer, column, first_row, rows);
            synchronize();
            attend(tiles, num_tiles, layer, columns, room.queries, room.activations);
            synchronize();
            multiply<WIDTH, WIDTH>(weights + 3 * WIDTH * WIDTH, room.activations, room.results);
            synchronize();
            add_and_normalize(room, vectors + 5 * WIDTH, vectors + 6 * WIDTH);
            synchronize();
            multiply<HIDDEN, WIDTH>(weights + 4 * WIDTH * WIDTH, room.activations, room.results);
            synchronize();
            for (int place = thread; place < ROWS * HIDDEN; place += THREADS) {
                const float value = room.results[place / HIDDEN * RESULTS + place % HIDDEN] + vectors[8 * WIDTH + place % HIDDEN];
                room.hidden[place] = value * 0.5f * (1.0f + erff(value * 0.70710678f));
            }
            synchronize();
            multiply<WIDTH, HIDDEN>(weights + 8 * WIDTH * WIDTH, room.hidden, room.results);
            synchronize();
            add_and_normalize(room, vectors + 12 * WIDTH, vectors + 13 * WIDTH); // the next layer's norm, or the last
            synchronize();
        }
        if (slot < 0) {
            for (int row = thread; row < rows; row += THREADS)
                room.tokens[row] = group.given(run, room.candidates[row], step + 1);
            synchronize();
            continue;
        }
        const long long head = (run.head_first + slot) % run.head_period;
        multiply<VOCABULARY_ROOM, WIDTH>(run.heads + head * VOCABULARY_ROOM * WIDTH, room.activations, room.results);
        synchronize();
        for (int row = thread / LANES; row < rows; row += WARPS) {
            const int candidate = room.candidates[row];
            Tally& tally = room.tallies[row];
            const auto noise = [&](int token) { return noise_of(run, tally, candidate, slot, token); };
            const int token = conclude(run, room.results + row * RESULTS, noise, env, candidate, tally, slot, true);
            if (thread % LANES == 0) room.tokens[row] = token;
        }
        synchronize();
    }
}
