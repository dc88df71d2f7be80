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

    float highest, total, found[4][4];
    uint4 query, first_keys, second_keys;
    uint2 value[4];

    __device__ void read(const Number* tile_keys, const Number* tile_values) {
        const int lane = thread % LANES, g = lane / 4, t = lane % 4;
        // Columns are dealt out so that lane t ends up with the scores of 4t .. 4t + 3.
        const Number* keys = tile_keys + (4 * (g / 2) + g % 2) * HEAD + 8 * t;
        first_keys = *reinterpret_cast<const uint4*>(keys);
        second_keys = *reinterpret_cast<const uint4*>(keys + 2 * HEAD);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[j] = *reinterpret_cast<const uint2*>(tile_values + g * TILE + 4 * t + 8 * j * TILE);
    }

    // Adds what was read; bit i of `open`: candidate g may see column i.
    __device__ void add(unsigned open) {
        open >>= thread % 4 * 4;
        float low[4] = {}, high[4] = {}; // scores of columns 4t, 4t + 1 and of 4t + 2, 4t + 3
        multiply_add(low, query.x, 0, query.y, 0, first_keys.x, first_keys.y);
        multiply_add(high, query.x, 0, query.y, 0, second_keys.x, second_keys.y);
        multiply_add(low, query.z, 0, query.w, 0, first_keys.z, first_keys.w);
        multiply_add(high, query.z, 0, query.w, 0, second_keys.z, second_keys.w);
        const float s0 = open & 1 ? low[0] : LOWEST, s1 = open & 2 ? low[1] : LOWEST;
        const float s2 = open & 4 ? high[0] : LOWEST, s3 = open & 8 ? high[1] : LOWEST;
        float higher = fmaxf(fmaxf(s0, s1), fmaxf(s2, s3));
        higher = fmaxf(higher, from_lane(higher, 1));
        higher = fmaxf(highest, fmaxf(higher, from_lane(higher, 2)));
        const float shrink = exp2f(highest - higher);
        const float p0 = open & 1 ? exp2f(s0 - higher) : 0.0f, p1 = open & 2 ? exp2f(s1 - higher) : 0.0f;
        const float p2 = open & 4 ? exp2f(s2 - higher) : 0.0f, p3 = open & 8 ? exp2f(s3 - higher) : 0.0f;
        total = total * shrink + ((p0 + p1) + (p2 + p3));
        highest = higher;
        const unsigned first = pack(p0, p1), second = pack(p2, p3);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            found[j][0] *= shrink, found[j][1] *= shrink;
            multiply_add(found[j], first, 0, second, 0, value[j].x, value[j].y);
        }
    }

    // Queries and the tiles asked for -> `attended`. `columns` of the segment being written were there before this token.
    __device__ void attend(int columns, bool sees_itself) {
        const int warp = thread / LANES, lane = thread % LANES, g = lane / 4, t = lane % 4;
        query = *reinterpret_cast<const uint4*>(room.queries + g * OWN_STRIDE + head() * HEAD + 8 * t);
        highest = LOWEST, total = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) found[j][0] = found[j][1] = found[j][2] = found[j][3] = 0.0f;
        int stage = 0;
        for (int index = split(); index < num_tiles; index += SPLITS) {
            wait_for_groups<AHEAD - 1>();
            __syncwarp();
            read(room.tiles[warp][stage][0], room.tiles[warp][stage][1]);
            const int listed = room.listed[warp][stage];
            __syncwarp();
            ask();
            if (++stage == AHEAD) stage = 0;
            add(listed >> g & 1 ? (1u << valid_columns((signed char)(listed >> 8), columns)) - 1 : 0);
        }
        if (sees_itself && split() == SPLITS - 1) { // which has no more tiles than others
            read(room.keys + head() * HEAD_TILE, room.values + head() * HEAD_TILE);
            add(1u << g);
        }
        total += from_lane(total, 1);
        total += from_lane(total, 2);
        if (t == 0) room.tops[warp][g] = highest, room.totals[warp][g] = total;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            *reinterpret_cast<float2*>(&room.found[warp][g][8 * j + 2 * t]) = make_float2(found[j][0], found[j][1]);
        synchronize();
        const int row = thread / OWN_WIDTH, feature = thread % OWN_WIDTH; // each thread puts one number together
        static_assert(THREADS == ROWS * OWN_WIDTH, "a thread for each number");
        float top = LOWEST, whole = 0.0f, sum = 0.0f;
#pragma unroll
        for (int s = feature / HEAD; s < WARPS; s += OWN_HEADS) top = fmaxf(top, room.tops[s][row]);
#pragma unroll
        for (int i = 0; i < SPLITS; ++i) {
            const int s = i * OWN_HEADS + feature / HEAD;
            const float weight = exp2f(room.tops[s][row] - top);
            whole += weight * room.totals[s][row];
            sum += weight * room.found[s][row][feature % HEAD];
        }
        room.attended[row * OWN_STRIDE + feature] = round_to(whole > 0.0f ? __fdividef(sum, whole) : 0.0f);
    }
};
