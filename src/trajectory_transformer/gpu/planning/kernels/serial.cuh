// The kernels on a CPU, for tests: one thread does the work of a whole block. Fast enough for many tests of the logic; for
// lanes, warps and clusters there is fibers.cuh.

#include <cmath>
#include <functional>

#define __device__ inline
#define LAUNCHED(name) static void name
static int block_index;
alignas(128) static char shared_bytes[1 << 20];
static const int thread = 0;
constexpr int LANES = 1, WARPS = 1;
inline void synchronize() {}
inline void synchronize_warp() {}
template <typename V> V from_lane(V value, int) { return value; }
template <typename V> V at_lane(V value, int) { return value; }
inline float warp_max(float value) { return value; }
inline int warp_min(int value) { return value; }
inline int warp_count(int value) { return value; }
inline int claim(int* place, int number) {
    const int before = *place;
    if (before == -1) *place = number;
    return before;
}
template <typename V> void lower(V* place, V number) { *place = *place < number ? *place : number; }

inline void launch(int blocks, int, std::function<void()> body) {
    for (block_index = 0; block_index < blocks; ++block_index) body();
}
