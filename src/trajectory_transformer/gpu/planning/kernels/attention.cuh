// Attention in bfloat16 on tensor cores. Each warp handles one head and every SPLITS-th tile of the list; `combine`
// merges the partial results of the warps that share a head. Tiles are prefetched several stages ahead, which is safe
// because keys and values of earlier tokens never change.

// Element order within a tile. Keys and (transposed) values are stored in the fragment order of the left operand of the
// mma instruction, so that a lane loads the 16 bytes of one instruction at once. These functions return the offset of
// dimension d of a column.
__device__ int key_offset(int column, int d) {
    const int lane = (column / 4 * 2 + column % 2) * 4 + d / 8;
    return d / 4 % 2 * 8 * LANES + lane * 8 + (d / 2 % 2 * 2 + column / 2 % 2) * 2 + d % 2;
}
__device__ int value_offset(int column, int d) {
    const int lane = d % 8 * 4 + column / 4;
    return d / 16 * 8 * LANES + lane * 8 + (column / 2 % 2 * 2 + d / 8 % 2) * 2 + column % 2;
}

struct Attention {
    Shared& shared;
    const Tile* tiles;
    const int num_tiles, rank;
    int prefetched, prefetch_stage;

    static __device__ int split() { return thread / LANES / OWN_HEADS; }
    static __device__ int head() { return thread / LANES % OWN_HEADS; }

    __device__ void prefetch(int layer) {
        const int warp = thread / LANES, lane = thread % LANES, index = split() + prefetched * SPLITS;
        if (index < num_tiles) {
            const Tile& tile = tiles[index];
            const long long from = (long long)(layer * tile.layer_stride) * (WIDTH * TILE) + (rank * OWN_HEADS + head()) * HEAD_TILE + 8 * lane;
            const Scalar* keys = tile.keys + from;
            const Scalar* values = tile.values + from;
            Scalar* into = &shared.tiles[warp][prefetch_stage][0][8 * lane];
            copy_async(into, keys), copy_async(into + HEAD_TILE / 2, keys + HEAD_TILE / 2);
            copy_async(into + HEAD_TILE, values), copy_async(into + HEAD_TILE * 3 / 2, values + HEAD_TILE / 2);
        }
        commit_group();
        ++prefetched;
        if (++prefetch_stage == STAGES) prefetch_stage = 0;
    }

    // Prefetches the first tiles of a layer.
    __device__ void prefetch_layer(int layer) {
        prefetched = prefetch_stage = 0;
        for (int i = 0; i < STAGES; ++i) prefetch(layer);
    }

    // Online softmax state for candidates 2t and 2t + 1: the reference that is subtracted from the scores, the sum of
    // exponentials over this lane's columns, and the weighted sum of values (dimensions g, g + 8, g + 16 and g + 24).
    float running_max[2], running_sum[2], values_sum[2][4];
    uint4 query, keys[2], values[2];

    // The first of the two columns whose scores this lane holds; the second is column() + 2.
    static __device__ int column() { return thread % LANES / 8 * 4 + thread / 4 % 2; }

    __device__ void load_fragments(const Scalar* tile_keys, const Scalar* tile_values) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            keys[i] = reinterpret_cast<const uint4*>(tile_keys)[i * LANES + lane_index()];
            values[i] = reinterpret_cast<const uint4*>(tile_values)[i * LANES + lane_index()];
        }
    }

    // Accumulates the loaded tile. `visible` masks the pairs (first column, candidate 2t), (first, 2t + 1),
    // (second, 2t), (second, 2t + 1).
    __device__ void accumulate(const bool (&visible)[4]) {
        float scores[4] = {};
        mma(scores, keys[0].x, keys[0].y, keys[0].z, keys[0].w, query.x, query.y);
        mma(scores, keys[1].x, keys[1].y, keys[1].z, keys[1].w, query.z, query.w);
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = visible[i] ? scores[i] : 2.0f * LOWEST; // exp2 of this is always 0
        float new_max[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
        // exp2 has headroom: the reference only needs to be close to the largest score, within 2^64.
        if (any_lane(new_max[0] > running_max[0] + 64.0f || new_max[1] > running_max[1] + 64.0f)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                for (int other = 4; other < LANES; other *= 2) new_max[i] = fmaxf(new_max[i], shuffle_xor(new_max[i], other));
                new_max[i] = fmaxf(new_max[i], running_max[i]);
                const float rescale = exp2_approx(running_max[i] - new_max[i]);
                running_max[i] = new_max[i], running_sum[i] *= rescale;
                values_sum[0][i] *= rescale, values_sum[0][2 + i] *= rescale, values_sum[1][i] *= rescale, values_sum[1][2 + i] *= rescale;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = exp2_approx(scores[i] - running_max[i % 2]), running_sum[i % 2] += scores[i];
        const unsigned first = transpose_8x8(pack(scores[0], scores[1])), second = transpose_8x8(pack(scores[2], scores[3]));
        mma(values_sum[0], values[0].x, values[0].y, values[0].z, values[0].w, first, second);
        mma(values_sum[1], values[1].x, values[1].y, values[1].z, values[1].w, first, second);
    }

    // Attends to all listed tiles. `columns` is the length of the segment being written, without the current token.
    __device__ void attend(int layer, int columns, bool attends_to_self) {
        const int warp = thread / LANES, lane = thread % LANES, g = lane / 4, t = lane % 4;
        query = *reinterpret_cast<const uint4*>(shared.queries + g * OWN_STRIDE + head() * HEAD + 8 * t);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            running_max[i] = LOWEST, running_sum[i] = 0.0f;
            values_sum[i][0] = values_sum[i][1] = values_sum[i][2] = values_sum[i][3] = 0.0f;
        }
        int stage = 0;
        for (int index = split(); index < num_tiles; index += SPLITS) {
            wait_group<STAGES - 1>();
            __syncwarp();
            load_fragments(shared.tiles[warp][stage][0], shared.tiles[warp][stage][1]);
            __syncwarp();
            prefetch(layer);
            if (++stage == STAGES) stage = 0;
            const int count = valid_columns(tiles[index].columns, columns), rows = tiles[index].rows >> 2 * t;
            const bool even = rows & 1, odd = rows & 2;
            const bool first = column() < count, second = column() + 2 < count;
            accumulate({even && first, odd && first, even && second, odd && second});
        }
        if (attends_to_self && split() == SPLITS - 1) { // this split never has more tiles than the others
            load_fragments(shared.keys + head() * HEAD_TILE, shared.values + head() * HEAD_TILE);
            accumulate({column() == 2 * t, column() == 2 * t + 1, column() + 2 == 2 * t, column() + 2 == 2 * t + 1});
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int other = 4; other < LANES; other *= 2) running_sum[i] += shuffle_xor(running_sum[i], other);
            if (g == 0) shared.split_max[2 * t + i][head()][split()] = running_max[i], shared.split_sum[2 * t + i][head()][split()] = running_sum[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) shared.split_values[warp][2 * t + i][g + 8 * j] = values_sum[j / 2][j % 2 * 2 + i];
        }
    }

    static constexpr int EACH = 4, QUADS = HEAD / EACH;
    static_assert(SPLITS == 8 && ROWS * OWN_HEADS * QUADS <= LANES * 8, "combine() reads two float4 per head; warps of `out` take no part");
    static __device__ bool combines() { return thread < ROWS * OWN_HEADS * QUADS; }

    // Merges the partial results of the SPLITS warps of each head. A thread handles four dimensions.
    __device__ void combine() {
        const int row = thread / (OWN_HEADS * QUADS), head = thread / QUADS % OWN_HEADS, dim = thread % QUADS * EACH;
        const float4* split_max = reinterpret_cast<const float4*>(shared.split_max[row][head]);
        const float4* split_sum = reinterpret_cast<const float4*>(shared.split_sum[row][head]);
        const float4 t0 = split_max[0], t1 = split_max[1], w0 = split_sum[0], w1 = split_sum[1];
        const float maxima[SPLITS] = {t0.x, t0.y, t0.z, t0.w, t1.x, t1.y, t1.z, t1.w};
        const float partial_sums[SPLITS] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
        float top = LOWEST, total = 0.0f, sums[EACH] = {};
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) top = fmaxf(top, maxima[s]);
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
            const float weight = exp2_approx(maxima[s] - top);
            const float4 partial = *reinterpret_cast<const float4*>(&shared.split_values[s * OWN_HEADS + head][row][dim]);
            total += weight * partial_sums[s];
            sums[0] += weight * partial.x, sums[1] += weight * partial.y, sums[2] += weight * partial.z, sums[3] += weight * partial.w;
        }
        const float scale = total > 0.0f ? __fdividef(1.0f, total) : 0.0f;
        unsigned* attended = reinterpret_cast<unsigned*>(shared.attended + row * OWN_STRIDE + head * HEAD + dim);
        attended[0] = pack(sums[0] * scale, sums[1] * scale);
        attended[1] = pack(sums[2] * scale, sums[3] * scale);
    }
};
