// Attention in bfloat16. Each warp takes one head and every SPLITS-th tile of a group's list; their results are put
// together at the end. Tiles are asked for long before they are needed: what earlier tokens left does not change.

struct Attention {
    const Run& run;
    Room& room;
    const int layer, side;
    const uint2* list; // of the group whose tiles are on their way
    uint2 entries;     // a lane's of that list: of every 32 tiles that this warp takes, one
    int num_tiles, asked;

    static __device__ int split() { return thread / LANES / OWN_HEADS; }
    static __device__ int head() { return thread / LANES % OWN_HEADS; }

    __device__ const uint2* list_of(int group) const { return static_cast<const uint2*>(run.lists) + (long long)group * run.max_tiles; }

    static __device__ uint2 entry(const uint2* list, int num_tiles, int first) {
        const int index = split() + (first + thread % LANES) * SPLITS;
        return index < num_tiles ? list[index] : uint2{0, 0};
    }

    // Asks for the first tiles of a group, whose entries were read before.
    __device__ void begin(const uint2* its_list, int its_num_tiles, uint2 first_entries) {
        list = its_list, num_tiles = its_num_tiles, entries = first_entries, asked = 0;
        for (int i = 0; i < AHEAD; ++i) ask();
    }

    __device__ void ask() {
        const int warp = thread / LANES, lane = thread % LANES;
        if (split() + asked * SPLITS < num_tiles) {
            if (asked && asked % LANES == 0) entries = entry(list, num_tiles, asked);
            const unsigned number = at_lane(entries.x, asked % LANES), listed = at_lane(entries.y, asked % LANES);
            const bool prompt = listed >> 16;
            const long long from = (long long)number * (WIDTH * TILE) + layer * (prompt ? run.prompt_stride : run.layer_stride)
                + (side * OWN_HEADS + head()) * HEAD_TILE + 8 * lane;
            const Number* keys = (prompt ? run.prompt_keys : run.keys) + from;
            const Number* values = (prompt ? run.prompt_values : run.values) + from;
            Number* into = &room.tiles[warp][asked % AHEAD][0][8 * lane];
#pragma unroll
            for (int i = 0; i < 4; ++i) begin_copy(into + i * 256, (i < 2 ? keys : values) + i % 2 * 256);
            if (lane == 0) room.listed[warp][asked % AHEAD] = int(listed);
        }
        end_group();
        ++asked;
    }

    // Of candidates 2t and 2t + 1: what scores are taken relative to, sums of their powers over this lane's columns, and
    // values found: numbers g, g + 8 and g + 16, g + 24.
    float reference[2], total[2], found[2][4];
    uint4 query, first_keys, second_keys;
    uint2 value[4];

    // Columns are dealt out so that lane t has 4t .. 4t + 3 of the values, and g two columns of the keys.
    static __device__ int column() { return thread % LANES / 8 * 4 + thread / 4 % 2; } // the other is two further

    __device__ void read(const Number* tile_keys, const Number* tile_values) {
        const int lane = thread % LANES, g = lane / 4, t = lane % 4;
        const Number* keys = tile_keys + column() * HEAD + 8 * t;
        first_keys = *reinterpret_cast<const uint4*>(keys);
        second_keys = *reinterpret_cast<const uint4*>(keys + 2 * HEAD);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[j] = *reinterpret_cast<const uint2*>(tile_values + g * TILE + 4 * t + 8 * j * TILE);
    }

    // Adds what was read; `open` says whether candidates 2t and 2t + 1 may see this lane's first and second column.
    __device__ void add(const bool (&open)[4]) {
        float scores[4] = {};
        multiply_add(scores, first_keys.x, second_keys.x, first_keys.y, second_keys.y, query.x, query.y);
        multiply_add(scores, first_keys.z, second_keys.z, first_keys.w, second_keys.w, query.z, query.w);
        float higher[2] = {LOWEST, LOWEST};
#pragma unroll
        for (int i = 0; i < 4; ++i) higher[i % 2] = fmaxf(higher[i % 2], open[i] ? scores[i] : LOWEST);
        // Powers of two have room to spare: what they are relative to has to be near the highest score only.
        if (any_lane(higher[0] > reference[0] + 64.0f || higher[1] > reference[1] + 64.0f)) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                for (int other = 4; other < LANES; other *= 2) higher[i] = fmaxf(higher[i], from_lane(higher[i], other));
                higher[i] = fmaxf(higher[i], reference[i]);
                const float shrink = exp2f(reference[i] - higher[i]);
                reference[i] = higher[i], total[i] *= shrink;
                found[0][i] *= shrink, found[0][2 + i] *= shrink, found[1][i] *= shrink, found[1][2 + i] *= shrink;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[i] = open[i] ? exp2f(scores[i] - reference[i % 2]) : 0.0f;
            total[i % 2] += scores[i];
        }
        const unsigned first = transposed(pack(scores[0], scores[1])), second = transposed(pack(scores[2], scores[3]));
        multiply_add(found[0], value[0].x, value[1].x, value[0].y, value[1].y, first, second);
        multiply_add(found[1], value[2].x, value[3].x, value[2].y, value[3].y, first, second);
    }

    // Queries and the tiles asked for -> `attended`. `columns` of the segment being written were there before this token.
    __device__ void attend(int columns, bool sees_itself) {
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
            const int listed = room.listed[warp][stage];
            __syncwarp();
            ask();
            if (++stage == AHEAD) stage = 0;
            const int count = valid_columns((signed char)(listed >> 8), columns);
            const bool even = listed >> 2 * t & 1, odd = listed >> (2 * t + 1) & 1;
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
            if (g == 0) room.tops[warp][2 * t + i] = reference[i], room.totals[warp][2 * t + i] = total[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) room.found[warp][2 * t + i][g + 8 * j] = found[j / 2][j % 2 * 2 + i];
        }
        synchronize();
        // A warp puts together a row's numbers of its head, each lane one of them; of the splits' weights each knows one.
        static_assert(WARPS == ROWS * OWN_HEADS && HEAD == LANES, "a thread for each number");
        const int row = split(), its = lane % SPLITS * OWN_HEADS + head();
        float top = room.tops[its][row], weight = top, whole, sum = 0.0f;
#pragma unroll
        for (int other = 1; other < SPLITS; other *= 2) top = fmaxf(top, from_lane(top, other));
        weight = exp2f(weight - top);
        whole = weight * room.totals[its][row];
#pragma unroll
        for (int other = 1; other < SPLITS; other *= 2) whole += from_lane(whole, other);
        weight = whole > 0.0f ? __fdividef(weight, whole) : 0.0f;
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) sum += at_lane(weight, i) * room.found[i * OWN_HEADS + head()][row][lane];
        room.attended[row * OWN_STRIDE + head() * HEAD + lane] = round_to(sum);
    }
};
