// Who goes on, and what goes on with them.

constexpr int MOST = 4096; // candidates of one environment
constexpr int TEAM = 128;  // threads that move a candidate, where there is little to move

struct Ranking {
    const float* scores;       // [E, K], larger is better
    const long long* identity; // [E, K], equal for copies
    long long* kept;           // [E, width], best first
    int candidates, width;
    int distinct;              // whether a copy of a candidate that ranks before it comes after all others
};

// Candidates become copies of their parents.
struct Selection {
    const long long* parents; // [E, K]
    Store before, after;
    const int* ancestors;     // [E, K before, MAX_SEGMENTS]; null before anything was read, as all below
    int* new_ancestors;       // [E, K, MAX_SEGMENTS]
    const int* places;        // [E, K before], where in the order each parent was
    int* new_places;          // [E, K]
    int* order;               // [E, K], candidates with near common ancestors side by side
    const Number* columns;    // keys and values of the segment being written, plane by plane (a layer's keys or values)
    Number* new_columns;      // where they go; null where they need not
    long long plane_stride;   // in numbers
    int row_numbers;          // of one candidate in a plane
    int candidates, candidates_before;
    int depth;                // segments after the prompt that ancestors are known of
    int completes;            // whether a segment is complete: then parents' rows are its ancestors
};

typedef unsigned long long Key; // what to sort by in the upper bits, a candidate's number in the lower 12
static_assert(MOST <= 1 << 12, "numbers of 12 bits");

__device__ Key key_of(unsigned upper, int number) { return (Key)upper << 12 | unsigned(number); }
template <typename Key> __device__ int number_of(Key key) { return int(key & 0xfff); }

// Which of two keys stays at place i, in a step of a bitonic network that sorts pieces of `size`.
template <typename Key> __device__ Key settled(Key own, Key other, int i, int size, int apart) {
    return ((i & apart) == 0) == ((i & size) == 0) ? (own < other ? own : other) : (own < other ? other : own);
}

__device__ int room_for(int count) {
    int room = LANES;
    while (room < count) room *= 2;
    return room;
}

// Sorts `count` keys; there is room up to the next power of two, at least a warp's. Neighbours in a warp swap by themselves.
template <typename Key> __device__ void sort(Key* keys, int count) {
    const int room = room_for(count);
    for (int i = thread + count; i < room; i += THREADS) keys[i] = ~Key(0);
    synchronize();
    for (int i = thread; i < room; i += THREADS) {
        Key own = keys[i];
        for (int size = 2; size <= LANES; size *= 2)
            for (int apart = size / 2; apart; apart /= 2) own = settled(own, from_lane(own, apart), i, size, apart);
        keys[i] = own;
    }
    synchronize();
    for (int size = 2 * LANES; size <= room; size *= 2) {
        for (int apart = size / 2; apart >= LANES; apart /= 2) {
            for (int pair = thread; pair < room / 2; pair += THREADS) {
                const int i = 2 * pair - (pair & (apart - 1));
                const Key a = keys[i], b = keys[i + apart];
                keys[i] = settled(a, b, i, size, apart), keys[i + apart] = settled(b, a, i + apart, size, apart);
            }
            synchronize();
        }
        for (int i = thread; i < room; i += THREADS) {
            Key own = keys[i];
            for (int apart = LANES / 2; apart; apart /= 2) own = settled(own, from_lane(own, apart), i, size, apart);
            keys[i] = own;
        }
        synchronize();
    }
}

// Larger scores first.
__device__ unsigned upper_of(float score) {
    union { float number; unsigned bits; } same;
    same.number = score + 0.0f; // so that there is one zero only
    return same.bits >> 31 ? same.bits : ~(same.bits | 0x80000000u);
}

// Marks keys of copies, so that they sort behind all others. Of those alike the first in a table of hashes speaks for all.
__device__ void mark_copies(Key* keys, const long long* identity, int count, unsigned* best, int* firsts, int* table) {
    const int mask = 2 * room_for(count) - 1;
    int spokesman[MOST / THREADS];
    for (int i = thread; i <= mask; i += THREADS) table[i] = -1;
    for (int i = thread; i < count; i += THREADS) best[i] = ~0u, firsts[i] = MOST;
    synchronize();
    for (int i = thread; i < count; i += THREADS) {
        int place = int((unsigned long long)identity[i] * 0x9E3779B97F4A7C15ull >> 40) & mask, other;
        while ((other = claim(&table[place], i)) >= 0 && identity[other] != identity[i]) place = (place + 1) & mask;
        spokesman[i / THREADS] = other < 0 ? i : other;
        lower(&best[spokesman[i / THREADS]], unsigned(keys[i] >> 12));
    }
    synchronize();
    for (int i = thread; i < count; i += THREADS)
        if (best[spokesman[i / THREADS]] == unsigned(keys[i] >> 12)) lower(&firsts[spokesman[i / THREADS]], i);
    synchronize();
    for (int i = thread; i < count; i += THREADS)
        if (firsts[spokesman[i / THREADS]] != i) keys[i] |= 1ull << 63;
}

// As `keep_best` in search/beam.py. One block for each environment.
LAUNCHED(keep)(const Ranking ranking) {
    const int count = ranking.candidates, room = room_for(count);
    Key* keys = reinterpret_cast<Key*>(shared_bytes);
    long long* identity = reinterpret_cast<long long*>(keys + room);
    unsigned* best = reinterpret_cast<unsigned*>(identity + room);
    int* firsts = reinterpret_cast<int*>(best + room);
    int* table = firsts + room;
    const long long first = (long long)block_index * count;
    for (int i = thread; i < count; i += THREADS) {
        identity[i] = ranking.identity[first + i];
        keys[i] = key_of(upper_of(ranking.scores[first + i]), i);
    }
    if (ranking.distinct) mark_copies(keys, identity, count, best, firsts, table);
    sort(keys, count);
    for (int i = thread; i < ranking.width; i += THREADS)
        ranking.kept[(long long)block_index * ranking.width + i] = number_of(keys[i]);
}

// Children follow the order of their parents, so that a family stays together and reads common keys and values once.
__device__ void arrange(const Selection& selection, int env) {
    const int count = selection.candidates;
    unsigned* keys = reinterpret_cast<unsigned*>(shared_bytes); // a place and a number both have 12 bits
    const long long first = (long long)env * count, before = (long long)env * selection.candidates_before;
    for (int i = thread; i < count; i += THREADS)
        keys[i] = unsigned(key_of(selection.places[before + selection.parents[first + i]], i));
    sort(keys, count);
    for (int i = thread; i < count; i += THREADS) {
        selection.order[first + i] = number_of(keys[i]);
        selection.new_places[first + number_of(keys[i])] = i;
    }
}

// Copies by `team` threads, of which this one is `member`.
template <typename V> __device__ void copy(V* to, const V* from, int count, int member, int team) {
    for (int i = member; i < count; i += team) to[i] = from[i];
}

// Keys and values of the segment being written, from one row to another of the same planes. A whole block.
__device__ void copy_columns(const Selection& selection, long long row, long long parent) {
    struct alignas(16) Piece { long long first, second; };
    constexpr int PIECE = sizeof(Piece) / sizeof(Number), AT_ONCE = 4; // asked for before the first is stored
    const int pieces = selection.row_numbers / PIECE, all = 2 * LAYERS * pieces;
    const auto place = [&](int i) { return i / pieces * selection.plane_stride + i % pieces * PIECE; };
    const Number* from = selection.columns + parent * selection.row_numbers;
    Number* to = selection.new_columns + row * selection.row_numbers;
    for (int first = thread; first < all; first += AT_ONCE * THREADS) {
        Piece held[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * THREADS < all) held[i] = *reinterpret_cast<const Piece*>(from + place(first + i * THREADS));
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * THREADS < all) *reinterpret_cast<Piece*>(to + place(first + i * THREADS)) = held[i];
    }
}

// The first block of an environment arranges its candidates, the others copy what their parents had: a candidate each where
// keys and values move, else a few.
LAUNCHED(select_parents)(const Selection selection) {
    const int team = selection.new_columns || THREADS < TEAM ? THREADS : TEAM, teams = THREADS / team;
    const int blocks = 1 + (selection.candidates + teams - 1) / teams; // of an environment
    const int env = block_index / blocks, number = block_index % blocks - 1, member = thread % team;
    if (number < 0) {
        if (selection.ancestors) arrange(selection, env);
        return;
    }
    const int candidate = number * teams + thread / team;
    if (candidate >= selection.candidates) return;
    const long long row = (long long)env * selection.candidates + candidate;
    const long long parent = (long long)env * selection.candidates_before + selection.parents[row];
    const Store &before = selection.before, &after = selection.after;
    copy(after.tokens + row * after.token_room, before.tokens + parent * before.token_room, before.num_tokens, member, team);
    copy(after.rewards + row * after.reward_room, before.rewards + parent * before.reward_room, before.num_rewards, member, team);
    if (member == 0) {
        after.log_prob[row] = before.log_prob[parent], after.value[row] = before.value[parent];
        after.ended[row] = before.ended[parent], after.identity[row] = before.identity[parent];
    }
    if (!selection.ancestors) return;
    int* ancestors = selection.new_ancestors + row * MAX_SEGMENTS;
    copy(ancestors, selection.ancestors + parent * MAX_SEGMENTS, selection.depth + 1, member, team);
    if (selection.completes && member == 0) ancestors[selection.depth + 1] = int(parent);
    if (selection.new_columns) copy_columns(selection, row, parent);
}

// What the caller must know.
#ifdef HOST
#define TOLD extern "C"
extern "C" void launch_extend(const Run* run, int groups) { launch(groups * RANKS, RANKS, [=] { extend(*run); }); }
extern "C" void launch_keep(const Ranking* ranking, int blocks) { launch(blocks, 1, [=] { keep(*ranking); }); }
extern "C" void launch_select(const Selection* selection, int envs) {
    const int teams = selection->new_columns || THREADS < TEAM ? 1 : THREADS / TEAM;
    launch(envs * (1 + (selection->candidates + teams - 1) / teams), 1, [=] { select_parents(*selection); });
}
#else
#define TOLD extern "C" __device__
#endif
TOLD int room_bytes = ROOM_BYTES(Room);
TOLD int run_bytes = sizeof(Run);
TOLD int tile_bytes = sizeof(Tile);
