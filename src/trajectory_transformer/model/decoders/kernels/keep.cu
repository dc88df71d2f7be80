// Who goes on, and in which order the others are worked on: one block for each environment.

constexpr int MOST = 4096; // candidates of one environment

struct Ranking {
    const float* scores;       // [E, K], larger is better
    const long long* identity; // [E, K], equal for copies
    long long* kept;           // [E, width], best first
    int candidates, width;
    int distinct;              // whether a copy of a candidate that ranks before it comes after all others
};

struct Arrangement {
    const long long* parents; // [E, K]
    const int* places;        // [E, K before], where in the order each parent was
    int* order;               // [E, K], candidates with near common ancestors side by side
    int* new_places;          // [E, K]
    int candidates, candidates_before;
};

typedef unsigned long long Key; // what to sort by in the upper half, a candidate's number in the lower

// Sorts `count` keys; there is room up to the next power of two. A bitonic network.
__device__ void sort(Key* keys, int count) {
    int room = 1;
    while (room < count) room *= 2;
    for (int i = thread + count; i < room; i += THREADS) keys[i] = ~0ull;
    synchronize();
    for (int size = 2; size <= room; size *= 2) {
        for (int apart = size / 2; apart; apart /= 2) {
            for (int pair = thread; pair < room / 2; pair += THREADS) {
                const int i = 2 * pair - (pair & (apart - 1)), other = i + apart;
                const Key a = keys[i], b = keys[other];
                if ((a > b) == ((i & size) == 0)) keys[i] = b, keys[other] = a;
            }
            synchronize();
        }
    }
}

__device__ Key key_of(unsigned upper, int number) { return (Key)upper << 32 | unsigned(number); }

// Larger scores first.
__device__ unsigned upper_of(float score) {
    union { float number; unsigned bits; } same;
    same.number = score + 0.0f; // so that there is one zero only
    return same.bits >> 31 ? same.bits : ~(same.bits | 0x80000000u);
}

// As `keep_best` in search/beam.py.
LAUNCHED(keep)(const Ranking ranking) {
    const int count = ranking.candidates;
    long long* identity = reinterpret_cast<long long*>(shared_bytes);
    int* ranks = reinterpret_cast<int*>(identity + count);
    Key* keys = reinterpret_cast<Key*>(identity + 2 * count);
    const long long first = (long long)block_index * count;
    for (int i = thread; i < count; i += THREADS) {
        identity[i] = ranking.identity[first + i];
        keys[i] = key_of(upper_of(ranking.scores[first + i]), i);
    }
    sort(keys, count);
    if (ranking.distinct) {
        for (int i = thread; i < count; i += THREADS) ranks[unsigned(keys[i])] = i;
        synchronize();
        // Copies come to lie side by side, best first, and with them whoever happens to have the same 32 bits of a hash.
        int* by_rank = ranks + count;
        for (int i = thread; i < count; i += THREADS) {
            by_rank[ranks[i]] = i;
            keys[i] = key_of(unsigned((unsigned long long)identity[i] * 0x9E3779B97F4A7C15ull >> 32), ranks[i]);
        }
        sort(keys, count);
        bool copies[MOST / THREADS];
        for (int i = thread; i < count; i += THREADS) {
            const long long own = identity[by_rank[unsigned(keys[i])]];
            bool copy = false;
            for (int before = i - 1; !copy && before >= 0 && keys[before] >> 32 == keys[i] >> 32; --before)
                copy = identity[by_rank[unsigned(keys[before])]] == own;
            copies[i / THREADS] = copy;
        }
        synchronize();
        for (int i = thread; i < count; i += THREADS) keys[i] = key_of(copies[i / THREADS], unsigned(keys[i]));
        sort(keys, count);
        for (int i = thread; i < ranking.width; i += THREADS)
            ranking.kept[(long long)block_index * ranking.width + i] = by_rank[unsigned(keys[i])];
        return;
    }
    for (int i = thread; i < ranking.width; i += THREADS)
        ranking.kept[(long long)block_index * ranking.width + i] = unsigned(keys[i]);
}

// Children follow the order of their parents, so that a family stays together and reads common keys and values once.
LAUNCHED(arrange)(const Arrangement arrangement) {
    const int count = arrangement.candidates;
    Key* keys = reinterpret_cast<Key*>(shared_bytes);
    const long long first = (long long)block_index * count, before = (long long)block_index * arrangement.candidates_before;
    for (int i = thread; i < count; i += THREADS)
        keys[i] = key_of(unsigned(arrangement.places[before + arrangement.parents[first + i]]), i);
    sort(keys, count);
    for (int i = thread; i < count; i += THREADS) {
        const int candidate = int(unsigned(keys[i]));
        arrangement.order[first + i] = candidate;
        arrangement.new_places[first + candidate] = i;
    }
}

// What the caller must know.
#ifdef HOST
#define TOLD extern "C"
extern "C" void launch_extend(const Run* run, int groups) { launch(groups * RANKS, RANKS, [=] { extend(*run); }); }
extern "C" void launch_keep(const Ranking* ranking, int blocks) { launch(blocks, 1, [=] { keep(*ranking); }); }
extern "C" void launch_arrange(const Arrangement* arrangement, int blocks) { launch(blocks, 1, [=] { arrange(*arrangement); }); }
#else
#define TOLD extern "C" __device__
#endif
TOLD int room_bytes = ROOM_BYTES(Room);
TOLD int run_bytes = sizeof(Run);
TOLD int tile_bytes = sizeof(Tile);
