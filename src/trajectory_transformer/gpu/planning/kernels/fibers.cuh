// CPU implementation of gpu.cuh for tests: every CUDA thread is a fiber, and fibers switch when they wait for each
// other. Slow, but it models lanes, warps, thread blocks and clusters, so tests can check everything except speed.

#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#define __device__ inline
#define KERNEL(name) static void name
#define CLUSTER_KERNEL(ranks, name) static void name
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

struct ThreadBarrier { int waiting = 0, phase = 0; };
struct ByteBarrier { long long pending_bytes = 0; int phase = 0; bool expected = false; };

struct Scheduler {
    std::vector<ucontext_t> contexts;
    std::vector<char> stacks, done;
    ucontext_t scheduler_context;
    int current = 0, first_block = 0;
    std::vector<char*> shared;
    std::vector<ThreadBarrier> blocks, warps;
    ThreadBarrier cluster;
    std::vector<unsigned> exchange; // 8 words per fiber, visible to its warp
    std::map<const void*, ByteBarrier> byte_barriers;
    std::function<void()> body;
};
static Scheduler scheduler;

inline void yield_fiber() { swapcontext(&scheduler.contexts[scheduler.current], &scheduler.scheduler_context); }

inline void arrive_and_wait(ThreadBarrier& barrier, int count) {
    const int phase = barrier.phase;
    if (++barrier.waiting == count) barrier.waiting = 0, ++barrier.phase;
    else while (barrier.phase == phase) yield_fiber();
}

inline void sync_warp() { arrive_and_wait(scheduler.warps[scheduler.current / LANES], LANES); }
inline unsigned* exchange_slot(int lane) { return &scheduler.exchange[(scheduler.current / LANES * LANES + lane) * 8]; }

static void enter() {
    scheduler.body();
    scheduler.done[scheduler.current] = 1;
    yield_fiber();
}

// Runs `body` in every thread of all blocks, one cluster of `ranks` blocks at a time.
inline void launch(int blocks, int ranks, std::function<void()> body) {
    Scheduler& m = scheduler;
    m.body = body;
    while (int(m.shared.size()) < ranks) m.shared.push_back(static_cast<char*>(aligned_alloc(128, SHARED)));
    const int count = ranks * BLOCK;
    m.contexts.resize(count), m.stacks.resize(size_t(count) * STACK), m.exchange.resize(count * 8);
    for (m.first_block = 0; m.first_block < blocks; m.first_block += ranks) {
        m.done.assign(count, 0), m.blocks.assign(ranks, {}), m.warps.assign(count / LANES, {}), m.cluster = {}, m.byte_barriers.clear();
        for (char* bytes : m.shared) memset(bytes, 0x7b, SHARED); // shared memory is not zero-initialised
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
                swapcontext(&m.scheduler_context, &m.contexts[m.current]);
            }
        }
    }
}
} // namespace fibers

using fibers::launch;

#define thread (fibers::scheduler.current % fibers::BLOCK)
#define block_index (fibers::scheduler.first_block + fibers::scheduler.current / fibers::BLOCK)
#define shared_bytes (fibers::scheduler.shared[fibers::scheduler.current / fibers::BLOCK])

inline void synchronize() { fibers::arrive_and_wait(fibers::scheduler.blocks[fibers::scheduler.current / fibers::BLOCK], fibers::BLOCK); }
inline void synchronize_warp() { fibers::sync_warp(); }

template <typename V> V shuffle(V value, int lane) {
    memcpy(fibers::exchange_slot(thread % LANES), &value, sizeof(V));
    fibers::sync_warp();
    memcpy(&value, fibers::exchange_slot(lane), sizeof(V));
    fibers::sync_warp();
    return value;
}
template <typename V> V shuffle_xor(V value, int apart) { return shuffle(value, thread % LANES ^ apart); }
inline void __syncwarp() { synchronize_warp(); }
template <typename V, typename Combine> V warp_reduce(V value, Combine combine) {
    for (int other = LANES / 2; other; other /= 2) value = combine(value, shuffle_xor(value, other));
    return value;
}
inline float warp_max(float value) { return warp_reduce(value, [](float a, float b) { return fmaxf(a, b); }); }
inline int warp_min(int value) { return warp_reduce(value, [](int a, int b) { return a < b ? a : b; }); }
inline int warp_count(int value) { return warp_reduce(value, std::plus<int>()); }
inline bool any_lane(bool value) { return warp_count(value) > 0; }
inline int claim(int* address, int number) {
    const int before = *address;
    if (before == -1) *address = number;
    return before;
}
template <typename V> void atomic_min(V* address, V number) { *address = *address < number ? *address : number; }

#ifdef BF16
typedef unsigned long long Barrier;

inline unsigned bits_of(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline unsigned round_bf16(float value) { return (bits_of(value) + 0x7fff + (bits_of(value) >> 16 & 1)) >> 16; }
inline unsigned pack(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
inline float unpack(unsigned both, int upper) {
    const unsigned bits = upper ? both & 0xffff0000u : both << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float exp2_approx(float exponent) { return exp2f(exponent); }
inline void mma(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const int lane = thread % LANES;
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(fibers::exchange_slot(lane), own, sizeof(own));
    fibers::sync_warp();
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const unsigned a = fibers::exchange_slot(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2];
            const unsigned b = fibers::exchange_slot(column * 4 + k % 8 / 2)[4 + k / 8];
            sums[i] += unpack(a, k % 2) * unpack(b, k % 2);
        }
    }
    fibers::sync_warp();
}

inline unsigned transpose_8x8(unsigned both) {
    const int g = thread % LANES / 4, t = thread % 4;
    const unsigned even = shuffle(both, 8 * t + g / 2), odd = shuffle(both, 8 * t + 4 + g / 2);
    return (g % 2 ? even >> 16 : even & 0xffffu) | (g % 2 ? odd & 0xffff0000u : odd << 16);
}

inline uint4 load_streaming(const uint4* address) { return *address; }
inline void copy_async(void* into, const void* from) { memcpy(into, from, 16); }
inline void commit_group() {}
template <int LEFT> void wait_group() {}
inline int rank_in_cluster() { return fibers::scheduler.current / fibers::BLOCK; }
inline void synchronize_cluster() { fibers::arrive_and_wait(fibers::scheduler.cluster, int(fibers::scheduler.contexts.size())); }

inline void try_complete(fibers::ByteBarrier& state) {
    if (state.expected && !state.pending_bytes) state.expected = false, ++state.phase;
}
inline void init_barrier(Barrier* barrier) { fibers::scheduler.byte_barriers[barrier] = {}; }
inline void expect_bytes(Barrier* barrier, int bytes) {
    fibers::ByteBarrier& state = fibers::scheduler.byte_barriers[barrier];
    state.pending_bytes += bytes, state.expected = true;
    try_complete(state);
}
inline void wait_barrier(Barrier* barrier, unsigned parity) {
    while (unsigned(fibers::scheduler.byte_barriers[barrier].phase & 1) == parity) fibers::yield_fiber();
}
inline void store_remote(float* address, float first, float second, Barrier* barrier, int rank) {
    const auto remote = [&](void* own) { return fibers::scheduler.shared[rank] + (static_cast<char*>(own) - shared_bytes); };
    float* to = reinterpret_cast<float*>(remote(address));
    to[0] = first, to[1] = second;
    fibers::ByteBarrier& state = fibers::scheduler.byte_barriers[remote(barrier)];
    state.pending_bytes -= 8;
    try_complete(state);
}
#endif
