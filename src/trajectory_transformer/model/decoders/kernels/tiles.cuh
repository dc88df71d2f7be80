// Which tiles of keys and values the candidates of a block attend to. Candidates with a common ancestor share its tiles.

struct Tile {
    const Number* keys;
    const Number* values;
    long long layer_stride;
    int rows;     // bit r: candidate r of the block reads it
    int columns;  // valid ones; -1 - i for tile i of the segment being written, which grows
};

__device__ int valid_columns(int listed, int columns) {
    if (listed >= 0) return listed;
    const int left = columns - TILE * (-1 - listed);
    return left < 0 ? 0 : (left > TILE ? TILE : left);
}

// Writes the list for candidates [rows] and returns its length. For one warp.
__device__ int list_tiles(const Run& run, int env, const int* candidates, int rows, Tile* list) {
    const int lane = thread % LANES;
    int length = 0;
    for (int base = 0; base <= run.depth; base += LANES) {
        const int segment = base + lane;
        const int tiles = segment == 0 ? run.prompt_tiles : run.tiles;
        const int columns = segment == 0 ? run.prompt_columns : run.capacity;
        int own[ROWS], leaders = 0, count = 0; // a leader is the first to have its ancestor
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (segment > run.depth || r >= rows) continue;
            own[r] = run.ancestors[((long long)env * run.candidates + candidates[r]) * MAX_SEGMENTS + segment];
            bool seen = false;
            for (int before = 0; before < r; ++before) seen |= own[before] == own[r];
            if (!seen) leaders |= 1 << r, count += tiles;
        }
        int place = length, total = 0; // tiles of the segments before this one, and of all
        for (int other = 0; other < LANES; ++other) {
            const int its = at_lane(count, other);
            if (other < lane) place += its;
            total += its;
        }
        length += total;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (!(leaders >> r & 1)) continue;
            int mask = 0;
            for (int other = r; other < ROWS; ++other) mask |= (other < rows && own[other] == own[r]) << other;
            for (int tile = 0; tile < tiles; ++tile) {
                const long long within = ((long long)own[r] * tiles + tile) * WIDTH * TILE;
                const long long begin = within + (segment ? run.segments[segment] * run.segment_stride : 0);
                const int left = columns - TILE * tile;
                list[place++] = Tile{(segment ? run.keys : run.prompt_keys) + begin, (segment ? run.values : run.prompt_values) + begin,
                                     segment ? run.layer_stride : run.prompt_stride, mask, left < TILE ? left : TILE};
            }
        }
    }
    for (int i = lane; i < rows * run.tiles; i += LANES) {
        const int r = i / run.tiles, tile = i % run.tiles;
        const long long row = (long long)env * run.candidates + candidates[r];
        const long long begin = run.current * run.segment_stride + (row * run.tiles + tile) * WIDTH * TILE;
        list[length + i] = Tile{run.keys + begin, run.values + begin, run.layer_stride, 1 << r, -1 - tile};
    }
    return length + rows * run.tiles;
}

// Where the tile of the current segment begins that holds a column of a row.
__device__ long long current_tile(const Run& run, long long row, int layer, int column) {
    return run.current * run.segment_stride + layer * run.layer_stride + (row * run.tiles + column / TILE) * WIDTH * TILE;
}
