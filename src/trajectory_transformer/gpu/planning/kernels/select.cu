// Kernels between two runs: rank candidates (`keep`) and copy the selected ones (`select_parents`).

constexpr int MAX_CANDIDATES = 4096; // per environment
constexpr int TEAM = 128;            // threads that copy one candidate if no keys and values are copied

struct Ranking {
    const float* scores;       // [E, K], larger is better
    const long long* identity; // [E, K], equal for duplicates
    long long* kept;           // [E, width], best first
    int candidates, width;
    int distinct;              // whether to rank duplicates after all other candidates
};

// Replaces candidates by copies of their parents.
struct Selection {
    const long long* parents; // [E, K]
    Store before, after;
    const int* ancestors;     // [E, K before, MAX_SEGMENTS]; null (with all pointers below) before a prompt is read
    int* new_ancestors;       // [E, K, MAX_SEGMENTS]
    const int* order_index;   // [E, K before], index of each parent in the order
    int* new_order_index;     // [E, K]
    int* order;               // [E, K], candidates with recent common ancestors next to each other
    const Scalar* columns;    // keys and values of the segment being written; a plane is one layer's keys or values
    Scalar* new_columns;      // destination; null if nothing is copied
    long long plane_stride;   // in elements
    int row_elements;         // elements of one candidate in a plane
    int candidates, candidates_before;
    int depth;                // complete segments after the prompt
    int completes;            // whether the segment is complete: then its ancestors are the parents' rows
};

typedef unsigned long long Key; // sort key in the upper bits, candidate index in the lower 12
static_assert(MAX_CANDIDATES <= 1 << 12, "candidate indices have 12 bits");

__device__ Key make_key(unsigned upper, int number) { return (Key)upper << 12 | unsigned(number); }
template <typename Key> __device__ int index_of(Key key) { return int(key & 0xfff); }

// Compare-exchange step of a bitonic sort of pieces of `size`: returns the key that belongs at index i.
template <typename Key> __device__ Key compare_exchange(Key own, Key other, int i, int size, int apart) {
    return ((i & apart) == 0) == ((i & size) == 0) ? (own < other ? own : other) : (own < other ? other : own);
}

__device__ int padded_count(int count) {
    int padded = LANES;
    while (padded < count) padded *= 2;
    return padded;
}

// Bitonic sort of `count` keys; the array needs capacity for padded_count(count). Steps within a warp use shuffles.
template <typename Key> __device__ void sort(Key* keys, int count) {
    const int padded = padded_count(count);
    for (int i = thread + count; i < padded; i += THREADS) keys[i] = ~Key(0);
    synchronize();
    for (int i = thread; i < padded; i += THREADS) {
        Key own = keys[i];
        for (int size = 2; size <= LANES; size *= 2)
            for (int apart = size / 2; apart; apart /= 2) own = compare_exchange(own, shuffle_xor(own, apart), i, size, apart);
        keys[i] = own;
    }
    synchronize();
    for (int size = 2 * LANES; size <= padded; size *= 2) {
        for (int apart = size / 2; apart >= LANES; apart /= 2) {
            for (int pair = thread; pair < padded / 2; pair += THREADS) {
                const int i = 2 * pair - (pair & (apart - 1));
                const Key a = keys[i], b = keys[i + apart];
                keys[i] = compare_exchange(a, b, i, size, apart), keys[i + apart] = compare_exchange(b, a, i + apart, size, apart);
            }
            synchronize();
        }
        for (int i = thread; i < padded; i += THREADS) {
            Key own = keys[i];
            for (int apart = LANES / 2; apart; apart /= 2) own = compare_exchange(own, shuffle_xor(own, apart), i, size, apart);
            keys[i] = own;
        }
        synchronize();
    }
}

// Maps a score to bits that sort in descending order of scores.
__device__ unsigned sortable_bits(float score) {
    union { float number; unsigned bits; } same;
    same.number = score + 0.0f; // turns -0 into +0
    return same.bits >> 31 ? same.bits : ~(same.bits | 0x80000000u);
}

// Marks the keys of duplicates so that they sort last. In a hash table of identities, one candidate represents each
// group of duplicates; the best score of the group, then the lowest index, stays unmarked.
__device__ void mark_duplicates(Key* keys, const long long* identity, int count, unsigned* best, int* first_index, int* table) {
    const int mask = 2 * padded_count(count) - 1;
    int representative[MAX_CANDIDATES / THREADS];
    for (int i = thread; i <= mask; i += THREADS) table[i] = -1;
    for (int i = thread; i < count; i += THREADS) best[i] = ~0u, first_index[i] = MAX_CANDIDATES;
    synchronize();
    for (int i = thread; i < count; i += THREADS) {
        int entry = int((unsigned long long)identity[i] * 0x9E3779B97F4A7C15ull >> 40) & mask, other;
        while ((other = claim(&table[entry], i)) >= 0 && identity[other] != identity[i]) entry = (entry + 1) & mask;
        representative[i / THREADS] = other < 0 ? i : other;
        atomic_min(&best[representative[i / THREADS]], unsigned(keys[i] >> 12));
    }
    synchronize();
    for (int i = thread; i < count; i += THREADS)
        if (best[representative[i / THREADS]] == unsigned(keys[i] >> 12)) atomic_min(&first_index[representative[i / THREADS]], i);
    synchronize();
    for (int i = thread; i < count; i += THREADS)
        if (first_index[representative[i / THREADS]] != i) keys[i] |= 1ull << 63;
}

// Ranks candidates, as `StepwiseDecoder.keep` in search/decoder.py. One thread block per environment.
KERNEL(keep)(const Ranking ranking) {
    const int count = ranking.candidates, padded = padded_count(count);
    Key* keys = reinterpret_cast<Key*>(shared_bytes);
    long long* identity = reinterpret_cast<long long*>(keys + padded);
    unsigned* best = reinterpret_cast<unsigned*>(identity + padded);
    int* first_index = reinterpret_cast<int*>(best + padded);
    int* table = first_index + padded;
    const long long first = (long long)block_index * count;
    for (int i = thread; i < count; i += THREADS) {
        identity[i] = ranking.identity[first + i];
        keys[i] = make_key(sortable_bits(ranking.scores[first + i]), i);
    }
    if (ranking.distinct) mark_duplicates(keys, identity, count, best, first_index, table);
    sort(keys, count);
    for (int i = thread; i < ranking.width; i += THREADS)
        ranking.kept[(long long)block_index * ranking.width + i] = index_of(keys[i]);
}

// Orders children like their parents, so that siblings stay together and share tiles of keys and values.
__device__ void order_children(const Selection& selection, int env) {
    const int count = selection.candidates;
    unsigned* keys = reinterpret_cast<unsigned*>(shared_bytes); // order index (12 bits) and candidate index (12 bits)
    const long long first = (long long)env * count, before = (long long)env * selection.candidates_before;
    for (int i = thread; i < count; i += THREADS)
        keys[i] = unsigned(make_key(selection.order_index[before + selection.parents[first + i]], i));
    sort(keys, count);
    for (int i = thread; i < count; i += THREADS) {
        selection.order[first + i] = index_of(keys[i]);
        selection.new_order_index[first + index_of(keys[i])] = i;
    }
}

// Copies with `team` threads; `member` is the index of this thread.
template <typename V> __device__ void copy(V* to, const V* from, int count, int member, int team) {
    for (int i = member; i < count; i += team) to[i] = from[i];
}

// Copies keys and values of the segment being written to another row. Run by a whole thread block.
__device__ void copy_columns(const Selection& selection, long long row, long long parent) {
    struct alignas(16) Piece { long long first, second; };
    constexpr int PIECE = sizeof(Piece) / sizeof(Scalar), AT_ONCE = 4; // loads in flight before the first store
    const int pieces = selection.row_elements / PIECE, all = 2 * LAYERS * pieces;
    const auto offset = [&](int i) { return i / pieces * selection.plane_stride + i % pieces * PIECE; };
    const Scalar* from = selection.columns + parent * selection.row_elements;
    Scalar* to = selection.new_columns + row * selection.row_elements;
    for (int first = thread; first < all; first += AT_ONCE * THREADS) {
        Piece held[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * THREADS < all) held[i] = *reinterpret_cast<const Piece*>(from + offset(first + i * THREADS));
        for (int i = 0; i < AT_ONCE; ++i)
            if (first + i * THREADS < all) *reinterpret_cast<Piece*>(to + offset(first + i * THREADS)) = held[i];
    }
}

// The first thread block of an environment orders its candidates. The others copy the parents' state: one candidate per
// block if keys and values are copied, else one per team.
KERNEL(select_parents)(const Selection selection) {
    const int team = selection.new_columns || THREADS < TEAM ? THREADS : TEAM, teams = THREADS / team;
    const int blocks = 1 + (selection.candidates + teams - 1) / teams; // per environment
    const int env = block_index / blocks, number = block_index % blocks - 1, member = thread % team;
    if (number < 0) {
        if (selection.ancestors) order_children(selection, env);
        return;
    }
    const int candidate = number * teams + thread / team;
    if (candidate >= selection.candidates) return;
    const long long row = (long long)env * selection.candidates + candidate;
    const long long parent = (long long)env * selection.candidates_before + selection.parents[row];
    const Store &before = selection.before, &after = selection.after;
    copy(after.tokens + row * after.token_capacity, before.tokens + parent * before.token_capacity, before.num_tokens, member, team);
    copy(after.rewards + row * after.reward_capacity, before.rewards + parent * before.reward_capacity, before.num_rewards, member, team);
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

// Constants that the caller reads, and entry points for the CPU.
#ifdef HOST
#define EXPORTED extern "C"
extern "C" void launch_extend(const Run* run, int groups) { launch(groups * RANKS, RANKS, [=] { extend(*run); }); }
extern "C" void launch_keep(const Ranking* ranking, int blocks) { launch(blocks, 1, [=] { keep(*ranking); }); }
extern "C" void launch_select(const Selection* selection, int envs) {
    const int teams = selection->new_columns || THREADS < TEAM ? 1 : THREADS / TEAM;
    launch(envs * (1 + (selection->candidates + teams - 1) / teams), 1, [=] { select_parents(*selection); });
}
#else
#define EXPORTED extern "C" __device__
#endif
EXPORTED int room_bytes = ALIGNED_BYTES(Shared);
EXPORTED int run_bytes = sizeof(Run);
EXPORTED int tile_bytes = sizeof(Tile);
