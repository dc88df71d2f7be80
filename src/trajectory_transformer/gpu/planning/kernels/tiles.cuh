// Lists the tiles of keys and values that a block's candidates attend to. Candidates share the tiles of a common
// ancestor.

struct Tile {
    const Scalar* keys;
    const Scalar* values;
    int layer_stride; // distance to the next layer's tile, in tiles
    int rows;         // bit r: candidate r of the block attends to this tile
    int columns;      // number of valid columns; -1 - i: tile i of the segment being written, which grows
};

__device__ int valid_columns(int listed, int columns) {
    if (listed >= 0) return listed;
    const int left = columns - TILE * (-1 - listed);
    return left < 0 ? 0 : (left > TILE ? TILE : left);
}

// Writes the tile list of candidates [rows] and returns its length. Run by one warp; each lane handles a segment.
__device__ int list_tiles(const Run& run, int env, const int* candidates, int rows, Tile* list) {
    const int lane = thread % LANES;
    const int of_prompt = int(run.prompt_stride / (WIDTH * TILE)), of_segment = int(run.layer_stride / (WIDTH * TILE));
    const auto ancestor = [&](int r, int segment) {
        return run.ancestors[((long long)env * run.candidates + candidates[r]) * MAX_SEGMENTS + segment];
    };
    int length = 0;
#pragma unroll 1
    for (int base = 0; base <= run.depth; base += LANES) {
        const int segment = base + lane;
        const int tiles = segment == 0 ? run.prompt_tiles : run.tiles;
        const int columns = segment == 0 ? run.prompt_columns : run.capacity;
        // Byte r: bit mask of the candidates that share the row of candidate r; 0 if a lower candidate has it already.
        unsigned long long readers = 0;
        int own[ROWS], count = 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) own[r] = segment <= run.depth && r < rows ? ancestor(r, segment) : -1;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            unsigned same = 0;
#pragma unroll
            for (int other = 0; other < ROWS; ++other) same |= unsigned(own[other] == own[r]) << other;
            if (own[r] < 0 || same & ((1 << r) - 1)) continue;
            readers |= (unsigned long long)same << 8 * r, count += tiles;
        }
        int next = length, total = 0; // index of this lane's first tile, number of tiles of all lanes
        for (int other = 0; other < LANES; ++other) {
            const int its = shuffle(count, other);
            if (other < lane) next += its;
            total += its;
        }
        length += total;
#pragma unroll 1
        for (int r = 0; r < rows; ++r) {
            const int mask = int(readers >> 8 * r & 255);
            if (!mask) continue;
            const long long first = (long long)ancestor(r, segment) * tiles;
#pragma unroll 1
            for (int tile = 0; tile < tiles; ++tile) {
                const long long begin = (first + tile) * WIDTH * TILE + (segment ? run.segments[segment] * run.segment_stride : 0);
                const int left = columns - TILE * tile;
                list[next++] = Tile{(segment ? run.keys : run.prompt_keys) + begin, (segment ? run.values : run.prompt_values) + begin,
                                     segment ? of_segment : of_prompt, mask, left < TILE ? left : TILE};
            }
        }
    }
#pragma unroll 1
    for (int i = lane; i < rows * run.tiles; i += LANES) {
        const int r = i / run.tiles, tile = i % run.tiles;
        const long long row = (long long)env * run.candidates + candidates[r];
        const long long begin = run.current * run.segment_stride + (row * run.tiles + tile) * WIDTH * TILE;
        list[length + i] = Tile{run.keys + begin, run.values + begin, of_segment, 1 << r, -1 - tile};
    }
    return length + rows * run.tiles;
}

// Offset of the tile of the current segment that holds a column of a row.
__device__ long long current_tile(const Run& run, long long row, int layer, int column) {
    return run.current * run.segment_stride + layer * run.layer_stride + (row * run.tiles + column / TILE) * WIDTH * TILE;
}
