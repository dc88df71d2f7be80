// The same as gpu.cuh on a CPU, for tests: every GPU thread is a fiber, and they take turns whenever one has to wait for
// others. Slow, but lanes, warps, blocks and clusters are all there, so that everything but speed can be checked.

#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define __device__ inline
#define LAUNCHED(name) static void name
#define LAUNCHED_IN_CLUSTERS(ranks, name) static void name
constexpr int LANES = 32, WARPS = 16;

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float rsqrtf(float value) { return 1.0f / sqrtf(value); }
inline float __fdividef(float value, float by) { return value / by; }

namespace fibers {
constexpr int BLOCK = LANES * WARPS, STACK = 1 << 16, SHARED = 1 << 18;

struct Meeting { int waiting = 0, round = 0; };
struct Counted { long long missing = 0; int round = 0; bool expected = false; };

struct Machine {
    std::vector<ucontext_t> contexts;
    std::vector<char> stacks, done;
    ucontext_t home;
    int current = 0, first_block = 0;
    std::vector<char*> shared;
    std::vector<Meeting> blocks, warps;
    Meeting cluster;
    std::vector<unsigned> words; // 8 of every fiber, to show to its warp
    std::map<const void*, Counted> counted;
    std::function<void()> body;
};
static Machine machine;

inline void give_way() { swapcontext(&machine.contexts[machine.current], &machine.home); }

inline void meet(Meeting& meeting, int count) {
    const int round = meeting.round;
    if (++meeting.waiting == count) meeting.waiting = 0, ++meeting.round;
    else while (meeting.round == round) give_way();
}

inline void meet_warp() { meet(machine.warps[machine.current / LANES], LANES); }
inline unsigned* words_of(int lane) { return &machine.words[(machine.current / LANES * LANES + lane) * 8]; }

static void enter() {
    machine.body();
    machine.done[machine.current] = 1;
    give_way();
}

// Runs a function by all threads of so many blocks, a cluster of `ranks` after the other.
inline void launch(int blocks, int ranks, std::function<void()> body) {
    Machine& m = machine;
    m.body = body;
    while (int(m.shared.size()) < ranks) m.shared.push_back(static_cast<char*>(aligned_alloc(128, SHARED)));
    const int count = ranks * BLOCK;
    m.contexts.resize(count), m.stacks.resize(size_t(count) * STACK), m.words.resize(count * 8);
    for (m.first_block = 0; m.first_block < blocks; m.first_block += ranks) {
        m.done.assign(count, 0), m.blocks.assign(ranks, {}), m.warps.assign(count / LANES, {}), m.cluster = {}, m.counted.clear();
        for (char* bytes : m.shared) memset(bytes, 0x7b, SHARED); // nobody may count on zeros
        for (int i = 0; i < count; ++i) {
            getcontext(&m.contexts[i]);
            m.contexts[i].uc_stack.ss_sp = &m.stacks[size_t(i) * STACK];
            m.contexts[i].uc_stack.ss_size = STACK;
            m.contexts[i].uc_link = nullptr;
            makecontext(&m.contexts[i], enter, 0);
        }
        for (bool going = true; going;) {
            going = false;
            for (m.current = 0; m.current < count; ++m.current) {
                if (m.done[m.current]) continue;
                going = true;
                swapcontext(&m.home, &m.contexts[m.current]);
            }
        }
    }
}
} // namespace fibers

using fibers::launch;

#define thread (fibers::machine.current % fibers::BLOCK)
#define block_index (fibers::machine.first_block + fibers::machine.current / fibers::BLOCK)
#define shared_bytes (fibers::machine.shared[fibers::machine.current / fibers::BLOCK])

inline void synchronize() { fibers::meet(fibers::machine.blocks[fibers::machine.current / fibers::BLOCK], fibers::BLOCK); }
inline void synchronize_warp() { fibers::meet_warp(); }

template <typename V> V at_lane(V value, int lane) {
    memcpy(fibers::words_of(thread % LANES), &value, sizeof(V));
    fibers::meet_warp();
    memcpy(&value, fibers::words_of(lane), sizeof(V));
    fibers::meet_warp();
    return value;
}
template <typename V> V from_lane(V value, int apart) { return at_lane(value, thread % LANES ^ apart); }
inline void __syncwarp() { synchronize_warp(); }
template <typename V, typename Join> V together(V value, Join join) {
    for (int other = LANES / 2; other; other /= 2) value = join(value, from_lane(value, other));
    return value;
}
inline float warp_max(float value) { return together(value, [](float a, float b) { return fmaxf(a, b); }); }
inline int warp_min(int value) { return together(value, [](int a, int b) { return a < b ? a : b; }); }
inline int warp_count(int value) { return together(value, std::plus<int>()); }
inline bool any_lane(bool value) { return warp_count(value) > 0; }
inline int claim(int* place, int number) {
    const int before = *place;
    if (before == -1) *place = number;
    return before;
}
template <typename V> void lower(V* place, V number) { *place = *place < number ? *place : number; }

#ifdef BF16
typedef unsigned long long Barrier;

inline unsigned bits_of(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline unsigned rounded(float value) { return (bits_of(value) + 0x7fff + (bits_of(value) >> 16 & 1)) >> 16; }
inline unsigned pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
inline float half_of(unsigned both, int upper) {
    const unsigned bits = upper ? both & 0xffff0000u : both << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float power_of_two(float exponent) { return exp2f(exponent); }
inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = thread % LANES;
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(fibers::words_of(lane), own, sizeof(own));
    fibers::meet_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const unsigned a = fibers::words_of(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2];
            const unsigned b = fibers::words_of(column * 4 + k % 8 / 2)[4 + k / 8];
            sums[i] += half_of(a, k % 2) * half_of(b, k % 2);
        }
    }
    fibers::meet_warp();
}

inline unsigned transposed(unsigned both) {
    const int g = thread % LANES / 4, t = thread % 4;
    const unsigned even = at_lane(both, 8 * t + g / 2), odd = at_lane(both, 8 * t + 4 + g / 2);
    return (g % 2 ? even >> 16 : even & 0xffffu) | (g % 2 ? odd & 0xffff0000u : odd << 16);
}

inline uint4 load_once(const uint4* place) { return *place; }
inline void begin_copy(void* into, const void* from) { memcpy(into, from, 16); }
inline void end_group() {}
template <int LEFT> void wait_for_groups() {}
inline int rank_in_cluster() { return fibers::machine.current / fibers::BLOCK; }
inline void synchronize_cluster() { fibers::meet(fibers::machine.cluster, int(fibers::machine.contexts.size())); }

inline void settle(fibers::Counted& counted) {
    if (counted.expected && !counted.missing) counted.expected = false, ++counted.round;
}
inline void make_barrier(Barrier* barrier) { fibers::machine.counted[barrier] = {}; }
inline void expect(Barrier* barrier, int bytes) {
    fibers::Counted& counted = fibers::machine.counted[barrier];
    counted.missing += bytes, counted.expected = true;
    settle(counted);
}
inline void wait_for(Barrier* barrier, unsigned parity) {
    while (unsigned(fibers::machine.counted[barrier].round & 1) == parity) fibers::give_way();
}
inline void send(float* place, float first, float second, Barrier* barrier, int rank) {
    const auto there = [&](void* own) { return fibers::machine.shared[rank] + (static_cast<char*>(own) - shared_bytes); };
    float* to = reinterpret_cast<float*>(there(place));
    to[0] = first, to[1] = second;
    fibers::Counted& counted = fibers::machine.counted[there(barrier)];
    counted.missing -= 8;
    settle(counted);
}
#endif
