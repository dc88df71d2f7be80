// Attention in bfloat16. Each warp takes one head and every SPLITS-th tile of the list; their results are put together at
// the end. Tiles are asked for long before they are needed: what earlier tokens left does not change.

// A tile's numbers lie as the matrix units want them, its keys and its values (transposed) as left factors, 16 bytes for
// each lane and instruction. Where the number d of a column is:
__device__ int key_place(int column, int d) {
    const int lane = (column / 4 * 2 + column % 2) * 4 + d / 8;
    return d / 4 % 2 * 8 * LANES + lane * 8 + (d / 2 % 2 * 2 + column / 2 % 2) * 2 + d % 2;
}
__device__ int value_place(int column, int d) {
    const int lane = d % 8 * 4 + column / 4;
    return d / 16 * 8 * LANES + lane * 8 + (column / 2 % 2 * 2 + d / 8 % 2) * 2 + column % 2;
}

struct Attention {
    Room& room;
    const Tile* tiles;
    const int num_tiles, rank;
    int asked, asked_stage;

    static __device__ int split() { return thread / LANES / OWN_HEADS; }
    static __device__ int head() { return thread / LANES % OWN_HEADS; }

    __device__ void ask(int layer) {
        const int warp = thread / LANES, lane = thread % LANES, index = split() + asked * SPLITS;
        if (index < num_tiles) {
            const Tile& tile = tiles[index];
            const long long from = (long long)(layer * tile.tiles_of_layer) * (WIDTH * TILE) + (rank * OWN_HEADS + head()) * HEAD_TILE + 8 * lane;
            const Number* keys = tile.keys + from;
            const Number* values = tile.values + from;
            Number* into = &room.tiles[warp][asked_stage][0][8 * lane];
            begin_copy(into, keys), begin_copy(into + HEAD_TILE / 2, keys + HEAD_TILE / 2);
            begin_copy(into + HEAD_TILE, values), begin_copy(into + HEAD_TILE * 3 / 2, values + HEAD_TILE / 2);
        }
        end_group();
        ++asked;
        if (++asked_stage == AHEAD) asked_stage = 0;
    }

    // Asks for the first tiles of a layer.
    __device__ void begin(int layer) {
        asked = asked_stage = 0;
        for (int i = 0; i < AHEAD; ++i) ask(layer);
    }

    // Of candidates 2t and 2t + 1: what scores are taken relative to, sums of their powers over this lane's columns, and
    // values found: numbers g, g + 8 and g + 16, g + 24.
    float reference[2], total[2], found[2][4];
    uint4 query, keys[2], values[2];

    // The first column whose scores a lane has; the other one is two further.
    static __device__ int column() { return thread % LANES / 8 * 4 + thread / 4 % 2; }

    __device__ void read(const Number* tile_keys, const Number* tile_values) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            keys[i] = reinterpret_cast<const uint4*>(tile_keys)[i * LANES + own_lane()];
            values[i] = reinterpret_cast<const uint4*>(tile_values)[i * LANES + own_lane()];
        }
    }

    // Adds what was read; `open` says whether candidates 2t and 2t + 1 may see this lane's first and second column.
    __device__ void add(const bool (&open)[4]) {
        float scores[4] = {};
        multiply_add(scores, keys[0].x, keys[0].y, keys[0].z, keys[0].w, query.x, query.y);
        multiply_add(scores, keys[1].x, keys[1].y, keys[1].z, keys[1].w, query.z, query.w);
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = open[i] ? scores[i] : 2.0f * LOWEST; // the power of which is 0 in any case
        float higher[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
        // Powers of two have room to spare: what they are relative to has to be near the highest score only.
        if (any_lane(higher[0] > reference[0] + 64.0f || higher[1] > reference[1] + 64.0f)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                for (int other = 4; other < LANES; other *= 2) higher[i] = fmaxf(higher[i], from_lane(higher[i], other));
                higher[i] = fmaxf(higher[i], reference[i]);
                const float shrink = power_of_two(reference[i] - higher[i]);
                reference[i] = higher[i], total[i] *= shrink;
                found[0][i] *= shrink, found[0][2 + i] *= shrink, found[1][i] *= shrink, found[1][2 + i] *= shrink;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = power_of_two(scores[i] - reference[i % 2]), total[i % 2] += scores[i];
        const unsigned first = transposed(pack(scores[0], scores[1])), second = transposed(pack(scores[2], scores[3]));
        multiply_add(found[0], values[0].x, values[0].y, values[0].z, values[0].w, first, second);
        multiply_add(found[1], values[1].x, values[1].y, values[1].z, values[1].w, first, second);
    }

    // Looks for the queries in the tiles asked for. `columns` of the segment being written were there before this token.
    __device__ void attend(int layer, int columns, bool sees_itself) {
        const int warp = thread / LANES, lane = thread % LANES, g = lane / 4, t = lane % 4;
        query = *reinterpret_cast<const uint4*>(room.queries + g * OWN_STRIDE + head() * HEAD + 8 * t);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            reference[i] = LOWEST, total[i] = 0.0f;
            found[i][0] = found[i][1] = found[i][2] = found[i][3] = 0.0f;
        }
        int stage = 0;
        for (int index = split(); index < num_tiles; index += SPLITS) {
            wait_for_groups<AHEAD - 1>();
            __syncwarp();
            read(room.tiles[warp][stage][0], room.tiles[warp][stage][1]);
            __syncwarp();
            ask(layer);
            if (++stage == AHEAD) stage = 0;
            const int count = valid_columns(tiles[index].columns, columns), rows = tiles[index].rows >> 2 * t;
            const bool even = rows & 1, odd = rows & 2;
            const bool first = column() < count, second = column() + 2 < count;
            add({even && first, odd && first, even && second, odd && second});
        }
        if (sees_itself && split() == SPLITS - 1) { // which has no more tiles than others
            read(room.keys + head() * HEAD_TILE, room.values + head() * HEAD_TILE);
            add({column() == 2 * t, column() == 2 * t + 1, column() + 2 == 2 * t, column() + 2 == 2 * t + 1});
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            for (int other = 4; other < LANES; other *= 2) total[i] += from_lane(total[i], other);
            if (g == 0) room.tops[2 * t + i][head()][split()] = reference[i], room.totals[2 * t + i][head()][split()] = total[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) room.found[warp][2 * t + i][g + 8 * j] = found[j / 2][j % 2 * 2 + i];
        }
    }

    static constexpr int EACH = 4, QUADS = HEAD / EACH;
    static_assert(SPLITS == 8 && ROWS * OWN_HEADS * QUADS <= LANES * 8, "two loads of four; none of those who do `out`");
    static __device__ bool combines() { return thread < ROWS * OWN_HEADS * QUADS; }

    // Puts together what the warps found, four numbers each of some threads.
    __device__ void combine() {
        const int row = thread / (OWN_HEADS * QUADS), head = thread / QUADS % OWN_HEADS, place = thread % QUADS * EACH;
        const float4* tops = reinterpret_cast<const float4*>(room.tops[row][head]);
        const float4* totals = reinterpret_cast<const float4*>(room.totals[row][head]);
        const float4 t0 = tops[0], t1 = tops[1], w0 = totals[0], w1 = totals[1];
        const float its_tops[SPLITS] = {t0.x, t0.y, t0.z, t0.w, t1.x, t1.y, t1.z, t1.w};
        const float its_totals[SPLITS] = {w0.x, w0.y, w0.z, w0.w, w1.x, w1.y, w1.z, w1.w};
        float top = LOWEST, whole = 0.0f, sums[EACH] = {};
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) top = fmaxf(top, its_tops[s]);
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) {
            const float weight = power_of_two(its_tops[s] - top);
            const float4 its = *reinterpret_cast<const float4*>(&room.found[s * OWN_HEADS + head][row][place]);
            whole += weight * its_totals[s];
            sums[0] += weight * its.x, sums[1] += weight * its.y, sums[2] += weight * its.z, sums[3] += weight * its.w;
        }
        const float scale = whole > 0.0f ? __fdividef(1.0f, whole) : 0.0f;
        unsigned* attended = reinterpret_cast<unsigned*>(room.attended + row * OWN_STRIDE + head * HEAD + place);
        attended[0] = pack(sums[0] * scale, sums[1] * scale);
        attended[1] = pack(sums[2] * scale, sums[3] * scale);
    }
};
