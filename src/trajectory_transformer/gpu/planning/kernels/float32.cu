// Extends every candidate by a run of slots in float32: reads a token, samples the next, and repeats within one launch.
//
// A thread block handles up to ROWS candidates of one environment. Candidates are independent between two selections,
// so blocks never synchronise with each other. Plain loops: this is the exact kernel, bf16.cu is the fast one.

constexpr int RANKS = 1; // thread blocks per cluster
constexpr int PER_LAYER = 12 * WIDTH * WIDTH;
constexpr int VECTORS = 13 * WIDTH; // per layer: norm, biases of QKV and `out`; norm, biases of `up` and `down`
constexpr int HIDDEN = 4 * WIDTH;
constexpr int RESULT_STRIDE = HIDDEN > PADDED_VOCABULARY ? HIDDEN : PADDED_VOCABULARY; // row stride of results

struct Shared { // shared memory of a block
    float x[ROWS * WIDTH];
    float activations[ROWS * WIDTH];
    float queries[ROWS * WIDTH];
    float hidden[ROWS * HIDDEN];
    float results[ROWS * RESULT_STRIDE];
    int candidates[ROWS], tokens[ROWS];
    CandidateState states[ROWS];
    int num_tiles;
};

// Matmul: weights [IN, OUT], rows [ROWS][IN] -> results [ROWS][RESULT_STRIDE].
template <int OUT, int IN> __device__ void matmul(const float* weights, const float* rows, float* results) {
    for (int out = thread; out < OUT; out += THREADS) {
        float sums[ROWS] = {};
        for (int in = 0; in < IN; ++in) {
            const float weight = weights[in * OUT + out];
            for (int row = 0; row < ROWS; ++row) sums[row] += weight * rows[row * IN + in];
        }
        for (int row = 0; row < ROWS; ++row) results[row * RESULT_STRIDE + out] = sums[row];
    }
}

// Adds results and bias to x (if bias is not null), then writes the layer norm of x to activations. One warp per
// candidate.
__device__ void add_and_normalize(Shared& shared, const float* bias, const float* norm) {
    const int lane = thread % LANES;
    for (int row = thread / LANES; row < ROWS; row += WARPS) {
        float* x = shared.x + row * WIDTH;
        float sum = 0.0f, squares = 0.0f;
        for (int i = lane; i < WIDTH; i += LANES) {
            if (bias) x[i] += shared.results[row * RESULT_STRIDE + i] + bias[i];
            sum += x[i];
        }
        const float mean = warp_sum(sum) / WIDTH;
        for (int i = lane; i < WIDTH; i += LANES) squares += (x[i] - mean) * (x[i] - mean);
        const float scale = 1.0f / sqrtf(warp_sum(squares) / WIDTH + 1e-5f);
        for (int i = lane; i < WIDTH; i += LANES)
            shared.activations[row * WIDTH + i] = (x[i] - mean) * scale * norm[i] + norm[WIDTH + i];
    }
}

// Stores queries in shared memory, and keys and values in the current segment, where later tokens read them.
__device__ void store_qkv(const Run& run, Shared& shared, const float* bias, int layer, int column, long long first_row, int rows) {
    for (int i = thread; i < ROWS * WIDTH; i += THREADS) {
        const int row = i / WIDTH, feature = i % WIDTH, head = feature / HEAD, d = feature % HEAD;
        const float* result = shared.results + row * RESULT_STRIDE + feature;
        shared.queries[i] = (result[0] + bias[feature]) / sqrtf(float(HEAD));
        if (row >= rows || column < 0) continue;
        const long long tile = current_tile(run, first_row + shared.candidates[row], layer, column);
        run.keys[tile + (head * TILE + column % TILE) * HEAD + d] = result[WIDTH] + bias[WIDTH + feature];
        run.values[tile + (head * HEAD + d) * TILE + column % TILE] = result[2 * WIDTH] + bias[2 * WIDTH + feature];
    }
}

// Attention: queries [ROWS][WIDTH] -> attended [ROWS][WIDTH]; warps loop over pairs of candidate and head. Tiles are
// assigned to lanes by their index among the candidate's own tiles, so that duplicates of a candidate get bit-identical
// results.
__device__ void attend(const Tile* tiles, int num_tiles, int layer, int columns, const float* queries, float* attended) {
    constexpr int AT_ONCE = LANES < TILE ? 1 : LANES / TILE, STEP = LANES / AT_ONCE; // parallel tiles, lanes per tile
    const int lane = thread % LANES;
    for (int pair = thread / LANES; pair < ROWS * HEADS; pair += WARPS) {
        const int row = pair / HEADS, head = pair % HEADS;
        const float* query = queries + row * WIDTH + head * HEAD;
        float running_max = LOWEST, sum_weights = 0.0f, values_sum[HEAD] = {};
        for (int index = 0, own = 0; index < num_tiles; ++index) {
            const Tile tile = tiles[index];
            if (!(tile.rows >> row & 1) || own++ % AT_ONCE != lane / STEP) continue;
            for (int column = lane % STEP; column < valid_columns(tile.columns, columns); column += STEP) {
                const long long from = (long long)(layer * tile.layer_stride) * (WIDTH * TILE);
                const float* key = tile.keys + from + (head * TILE + column) * HEAD;
                const float* value = tile.values + from + head * HEAD * TILE + column;
                float score = 0.0f;
                for (int d = 0; d < HEAD; ++d) score += query[d] * key[d];
                const float new_max = fmaxf(running_max, score), rescale = expf(running_max - new_max), weight = expf(score - new_max);
                sum_weights = sum_weights * rescale + weight;
                for (int d = 0; d < HEAD; ++d) values_sum[d] = values_sum[d] * rescale + weight * value[d * TILE];
                running_max = new_max;
            }
        }
        const float top = warp_max(running_max), rescale = expf(running_max - top);
        sum_weights = warp_sum(sum_weights * rescale);
        for (int d = 0; d < HEAD; ++d) {
            const float sum = warp_sum(values_sum[d] * rescale);
            if (d % LANES == lane) attended[row * WIDTH + head * HEAD + d] = sum_weights > 0.0f ? sum / sum_weights : 0.0f;
        }
    }
}

KERNEL(extend)(const Run run) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    Tile* tiles = reinterpret_cast<Tile*>(shared_bytes + ALIGNED_BYTES(Shared));
    const Group group(run, block_index / RANKS);
    for (int row = thread; row < ROWS; row += THREADS) {
        shared.candidates[row] = group.candidate(run, row);
        shared.tokens[row] = row < group.rows ? group.given(run, shared.candidates[row], 0) : 0;
        shared.states[row] = group.load_state(run, shared.candidates[row]);
    }
    synchronize();
    const int env = group.env, rows = group.rows;
    const long long first_row = group.first_row;
    if (thread < LANES) {
        const int length = list_tiles(run, env, shared.candidates, rows, tiles);
        if (thread == 0) shared.num_tiles = length;
    }
    synchronize();
    const int num_tiles = shared.num_tiles;
    int columns = run.columns;

    for (int step = 0; step < run.num_given - 1 + run.num_slots; ++step) {
        const int position = run.start + step, slot = step - (run.num_given - 1);
        for (int i = thread; i < ROWS * WIDTH; i += THREADS)
            shared.x[i] = embedding_element(run, env, shared.tokens[i / WIDTH], position, run.offsets[position], i % WIDTH);
        synchronize();
        add_and_normalize(shared, nullptr, run.vectors);
        synchronize();
        const bool kept = run.readable[position];
        const int column = kept ? columns : -1;
        columns += kept;
        for (int layer = 0; layer < LAYERS; ++layer) {
            const float* weights = run.weights + (long long)layer * PER_LAYER;
            const float* vectors = run.vectors + layer * VECTORS;
            matmul<3 * WIDTH, WIDTH>(weights, shared.activations, shared.results);
            synchronize();
            store_qkv(run, shared, vectors + 2 * WIDTH, layer, column, first_row, rows);
            synchronize();
            attend(tiles, num_tiles, layer, columns, shared.queries, shared.activations);
            synchronize();
            matmul<WIDTH, WIDTH>(weights + 3 * WIDTH * WIDTH, shared.activations, shared.results);
            synchronize();
            add_and_normalize(shared, vectors + 5 * WIDTH, vectors + 6 * WIDTH);
            synchronize();
            matmul<HIDDEN, WIDTH>(weights + 4 * WIDTH * WIDTH, shared.activations, shared.results);
            synchronize();
            for (int i = thread; i < ROWS * HIDDEN; i += THREADS) {
                const float value = shared.results[i / HIDDEN * RESULT_STRIDE + i % HIDDEN] + vectors[8 * WIDTH + i % HIDDEN];
                shared.hidden[i] = value * 0.5f * (1.0f + erff(value * 0.70710678f));
            }
            synchronize();
            matmul<WIDTH, HIDDEN>(weights + 8 * WIDTH * WIDTH, shared.hidden, shared.results);
            synchronize();
            add_and_normalize(shared, vectors + 12 * WIDTH, vectors + 13 * WIDTH); // next layer's norm, or the final one
            synchronize();
        }
        if (slot < 0) {
            for (int row = thread; row < rows; row += THREADS)
                shared.tokens[row] = group.given(run, shared.candidates[row], step + 1);
            synchronize();
            continue;
        }
        const long long head = (run.head_first + slot) % run.head_period;
        matmul<PADDED_VOCABULARY, WIDTH>(run.heads + head * PADDED_VOCABULARY * WIDTH, shared.activations, shared.results);
        synchronize();
        for (int row = thread / LANES; row < rows; row += WARPS) {
            const int candidate = shared.candidates[row];
            CandidateState& state = shared.states[row];
            const auto noise = [&](int token) { return noise_of(run, state, candidate, slot, token); };
            const int token = finish_slot(run, shared.results + row * RESULT_STRIDE, noise, env, candidate, state, slot, true);
            if (thread % LANES == 0) shared.tokens[row] = token;
        }
        synchronize();
    }
}
