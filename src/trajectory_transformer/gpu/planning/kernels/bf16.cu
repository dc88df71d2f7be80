// Extends every candidate by a run of slots: bfloat16 matmuls on tensor cores with float32 accumulation.
//
// A cluster of two thread blocks handles up to ROWS candidates. Each block computes half of the heads and half of the
// hidden units. After attention and after the MLP, the blocks exchange partial sums through distributed shared memory.
// Both blocks compute the rest (layer norms, sampling). A block therefore reads only half of the weights, and
// prefetches them into registers while it does other work.

// Epilogue of the QKV matmul: adds the bias to a strip and stores it in shared memory in the order attention reads.
__device__ void store_qkv_strip(Shared& shared, float (&sums)[4], const float* bias, int strip, int rank) {
    const int g = lane_index() / 4, t = lane_index() % 4, kind = strip / (QKV_STRIPS / 3), feature = strip % (QKV_STRIPS / 3) * 16 + g;
    const int head = feature / HEAD, d = feature % HEAD;
    bias += kind * WIDTH + rank * OWN_WIDTH + feature;
    sums[0] += bias[0], sums[1] += bias[0], sums[2] += bias[8], sums[3] += bias[8];
    if (kind == 0) {
        constexpr float SCALE = 1.4426950408889634f * 0.17677669529663687f; // log2(e) / sqrt(32): softmax uses exp2
        Scalar* queries = shared.queries + 2 * t * OWN_STRIDE + feature;
        queries[0] = round_to(sums[0] * SCALE), queries[OWN_STRIDE] = round_to(sums[1] * SCALE);
        queries[8] = round_to(sums[2] * SCALE), queries[OWN_STRIDE + 8] = round_to(sums[3] * SCALE);
    } else if (kind == 1) {
        Scalar* keys = shared.keys + head * HEAD_TILE + key_offset(2 * t, d); // column + 1: 32 elements on, d + 8: 8 on
        keys[0] = round_to(sums[0]), keys[32] = round_to(sums[1]), keys[8] = round_to(sums[2]), keys[40] = round_to(sums[3]);
    } else { // column + 1 is the next element, then d + 8
        unsigned* values = reinterpret_cast<unsigned*>(shared.values + head * HEAD_TILE + value_offset(2 * t, d));
        values[0] = pack(sums[0], sums[1]), values[1] = pack(sums[2], sums[3]);
    }
}

// Stores a row's keys and values in the current segment, where later tokens read them. Run by one warp.
__device__ void store_keys_values(const Run& run, const Shared& shared, int row, int layer, int column, int rank) {
    const int lane = lane_index();
    const long long offset = current_tile(run, shared.group.first_row + shared.candidates[row], layer, column) + rank * OWN_HEADS * HEAD_TILE;
#pragma unroll
    for (int head = 0; head < OWN_HEADS; ++head) {
        const long long tile = offset + head * HEAD_TILE;
        run.keys[tile + key_offset(column % TILE, lane)] = shared.keys[head * HEAD_TILE + key_offset(row, lane)];
        run.values[tile + value_offset(column % TILE, lane)] = shared.values[head * HEAD_TILE + value_offset(row, lane)];
    }
}

// Up projection, bias and GELU of a strip of hidden units. `then` runs after the matmul, when the weight registers are
// free again.
template <typename Then> __device__ void store_hidden(Shared& shared, const uint4 (&up)[8], const float* bias, Then then) {
    const int g = lane_index() / 4, t = lane_index() % 4, first = warp_index() * 16;
    float sums[4] = {bias[first + g], bias[first + g], bias[first + g + 8], bias[first + g + 8]};
    matmul_strip<8>(up, shared.activations, STRIDE, sums);
    then();
    unsigned* hidden = reinterpret_cast<unsigned*>(shared.hidden + 2 * t * HIDDEN_STRIDE + first + 2 * g);
    hidden[0] = pack(fast_gelu(sums[0]), fast_gelu(sums[2]));
    hidden[HIDDEN_STRIDE / 2] = pack(fast_gelu(sums[1]), fast_gelu(sums[3]));
}

// Loads element i of the biases and layer norm parameters. Biases of QKV and `up` keep their order; the others are
// permuted to the order of `broadcast_sums`.
__device__ float vector_element(const Run& run, int i) {
    const int kind = i / WIDTH % (VECTORS / WIDTH);
    const bool plain = i < LAYERS * VECTORS && ((kind >= 2 && kind < 5) || (kind >= 8 && kind < 12));
    return run.vectors[i / WIDTH * WIDTH + (plain ? i % WIDTH : feature_of(i % WIDTH))];
}

// Prefetches this block's half of a layer's weights into registers.
struct Weights {
    const Scalar* all;
    int rank;
    uint4 a[8], b[8]; // a: QKV, `up` and heads in turn; b: `out` and `down` in turn

    __device__ const Scalar* layer_weights(int layer) const { return all + ((long long)layer * RANKS + rank) * PER_RANK; }
    __device__ const Scalar* down_weights(int layer) const { return layer_weights(layer) + DOWN_OFFSET + warp_half() * (WIDTH * OWN_HIDDEN / 2); }

    __device__ void prefetch_qkv(int layer) {
        if (warp_index() < QKV_STRIPS) prefetch<0, 8>(a, layer_weights(layer), warp_index() * 8);
    }
    __device__ void prefetch_up(int layer) { prefetch<0, 8>(a, layer_weights(layer) + UP_OFFSET, warp_index() * 8); }
    __device__ void prefetch_head(const Scalar* head) { prefetch<0, 8>(a, head, strip_index() * 8); }

    // Prefetches `out`, and as much of `down` as fits in the registers that `out` leaves free.
    __device__ void prefetch_out(int layer) {
        if (warp_half()) prefetch<0, 4>(b, layer_weights(layer) + OUT_OFFSET, strip_index() * 4), prefetch<4, 4>(b, down_weights(layer), strip_index() * 8);
        else prefetch<0, 8>(b, down_weights(layer), strip_index() * 8);
    }
    __device__ void prefetch_rest_of_down(int layer) { prefetch<0, 4>(b, down_weights(layer), strip_index() * 8); }
};

CLUSTER_KERNEL(RANKS, extend)(const Run run) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    Tile* tiles = reinterpret_cast<Tile*>(shared_bytes + ALIGNED_BYTES(Shared));
    const int rank = rank_in_cluster();
    Weights weights{run.weights, rank};
    weights.prefetch_qkv(0);
    weights.prefetch_out(0);
    if (thread < ROWS) {
        const Group group(run, block_index / RANKS);
        const int candidate = group.candidate(run, thread);
        shared.candidates[thread] = candidate;
        shared.states[thread] = group.load_state(run, candidate);
        if (thread == 0) shared.group = group;
    }
    if (thread == 0) {
        for (int i = 0; i < 2; ++i) init_barrier(&shared.arrived[i]);
    }
    synchronize();
    const Group& group = shared.group;
    if (warp_index() == WARPS - 1) {
        const int length = list_tiles(run, group.env, shared.candidates, group.rows, tiles);
        if (lane_index() == 0) shared.num_tiles = length;
    }
    for (int i = thread; i < LAYERS * VECTORS + 2 * WIDTH; i += THREADS) shared.vectors[i] = vector_element(run, i);
    for (int i = thread; i < OWN_HEADS * HEAD_TILE; i += THREADS) shared.keys[i] = shared.values[i] = 0;
    synchronize_cluster(); // both blocks must be running before either writes to the other
    Attention attention{shared, tiles, shared.num_tiles, rank};
    attention.prefetch_layer(0);
    int columns = run.columns;
    unsigned parity = 0;

    const int num_steps = run.num_given - 1 + run.num_slots;
    const auto row_in_use = [&] { return row_index() < group.rows; }; // groups may be smaller than ROWS
    int token = row_in_use() ? group.given(run, shared.candidates[row_index()], 0) : 0;
    for (int step = 0; step < num_steps; ++step) {
        const int position = run.start + step, slot = step - (run.num_given - 1);
        const bool readable = run.readable[position], last_step = step + 1 == num_steps;
        RowFragment fragment{};
        if (owns_row()) {
            if (row_in_use()) fragment.embed(run, group.env, token, position);
            fragment.normalize(shared.vectors, shared.activations);
        }
        synchronize();
        for (int layer = 0; layer < LAYERS; ++layer) {
            const bool last_layer = layer + 1 == LAYERS;
            const int next_layer = last_layer ? 0 : layer + 1;
            const float* vectors = shared.vectors + layer * VECTORS;
            if (warp_index() < QKV_STRIPS) {
                float sums[4] = {};
                matmul_strip<8>(weights.a, shared.activations, STRIDE, sums);
                store_qkv_strip(shared, sums, vectors + 2 * WIDTH, warp_index(), rank);
            }
            weights.prefetch_up(layer);
            synchronize();
            if (warp_half() && readable && row_in_use()) store_keys_values(run, shared, row_index(), layer, columns, rank);
            attention.attend(layer, columns, readable);
            synchronize();
            // Threads that do not combine prefetch the tiles of the next layer.
            const bool has_next = !last_layer || !last_step;
            if (Attention::combines()) attention.combine();
            else if (has_next) attention.prefetch_layer(next_layer);
            if (thread == 0) expect_bytes(&shared.arrived[0], PART_BYTES);
            synchronize();
            if (warp_half()) {
                float sums[4] = {};
                matmul_strip<4>(weights.b, shared.attended, OWN_STRIDE, sums);
                broadcast_sums(sums, shared.after_attention[rank], &shared.arrived[0], strip_index(), rank);
            }
            if (Attention::combines() && has_next) attention.prefetch_layer(next_layer);
            synchronize();
            if (owns_row()) {
                fragment.add_exchanged<1>(shared.after_attention, vectors + 5 * WIDTH, &shared.arrived[0], parity, rank);
                fragment.normalize(vectors + 6 * WIDTH, shared.activations);
            } else weights.prefetch_rest_of_down(layer);
            synchronize();
            store_hidden(shared, weights.a, vectors + 8 * WIDTH + rank * OWN_HIDDEN, [&] {
                if (last_layer && slot >= 0 && owns_row())
                    weights.prefetch_head(run.heads + (long long)((run.head_first + slot) % run.head_period) * PADDED_VOCABULARY * WIDTH);
                else weights.prefetch_qkv(next_layer);
            });
            if (thread == 0) expect_bytes(&shared.arrived[1], 2 * PART_BYTES);
            synchronize();
            float parts[4] = {};
            matmul_strip<8>(weights.b, shared.hidden + warp_half() * (OWN_HIDDEN / 2), HIDDEN_STRIDE, parts);
            broadcast_sums(parts, shared.after_mlp[2 * rank + warp_half()], &shared.arrived[1], strip_index(), rank);
            synchronize();
            weights.prefetch_out(next_layer);
            if (owns_row()) {
                fragment.add_exchanged<2>(shared.after_mlp, vectors + 12 * WIDTH, &shared.arrived[1], parity, rank);
                fragment.normalize(vectors + 13 * WIDTH, shared.activations); // next layer's norm, or the final one
            }
            parity ^= 1;
            synchronize();
        }
        columns += readable;
        if (slot < 0) {
            if (row_in_use()) token = group.given(run, shared.candidates[row_index()], step + 1);
            continue;
        }
        if (owns_row()) {
            float sums[4] = {};
            matmul_strip<8>(weights.a, shared.activations, STRIDE, sums);
            float* logits = shared.logits + lane_index() % 4 * 2 * SUM_STRIDE + strip_index() * 16 + lane_index() / 4;
            logits[0] = sums[0], logits[SUM_STRIDE] = sums[1], logits[8] = sums[2], logits[SUM_STRIDE + 8] = sums[3];
            weights.prefetch_qkv(0); // for the next token
        } else if (row_in_use() && run.parts[Slot(run, slot).part].seeds) { // the other warps generate noise
            for (int i = lane_index(); i < VOCABULARY; i += LANES)
                shared.noise[row_index()][i] = noise_of(run, shared.states[row_index()], shared.candidates[row_index()], slot, i);
        }
        synchronize();
        if (owns_row() && row_in_use()) {
            const int row = row_index();
            const auto noise = [&](int i) { return shared.noise[row][i]; };
            token = finish_slot(run, shared.logits + row * SUM_STRIDE, noise, group.env, shared.candidates[row], shared.states[row], slot, rank == 0);
        }
    }
}
