// CPU implementation for tests: one thread does the work of a whole thread block. Fast enough to test the logic;
// fibers.cuh also models lanes, warps and clusters.

#include <cmath>
#include <functional>

#define __device__ inline
#define KERNEL(name) static void name
static int block_index;
alignas(128) static char shared_bytes[1 << 20];
static const int thread = 0;
constexpr int LANES = 1, WARPS = 1;
inline void synchronize() {}
inline void synchronize_warp() {}
template <typename V> V shuffle_xor(V value, int) { return value; }
template <typename V> V shuffle(V value, int) { return value; }
inline float warp_max(float value) { return value; }
inline int warp_min(int value) { return value; }
inline int warp_count(int value) { return value; }
inline int claim(int* address, int number) {
    const int before = *address;
    if (before == -1) *address = number;
    return before;
}
template <typename V> void atomic_min(V* address, V number) { *address = *address < number ? *address : number; }

inline void launch(int blocks, int, std::function<void()> body) {
    for (block_index = 0; block_index < blocks; ++block_index) body();
}
