// What the kernels ask of a GPU beyond plain C++. fibers.cuh has the same on a CPU, serial.cuh what one thread can do.

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define LAUNCHED(name) extern "C" __global__ void __launch_bounds__(512, 1) name
#define LAUNCHED_IN_CLUSTERS(ranks, name) extern "C" __global__ void __cluster_dims__(ranks, 1, 1) __launch_bounds__(512, 1) name
#define block_index int(blockIdx.x)
// A number that the compiler takes for a new one each time. Else it computes what follows from it once, before all loops,
// and keeps it in registers that are needed for weights.
__device__ int afresh(int value) {
    asm volatile("" : "+r"(value));
    __builtin_assume(value >= 0 && value < 512);
    return value;
}
#define thread afresh(int(threadIdx.x))
extern __shared__ __align__(128) char shared_bytes[];
constexpr int LANES = 32, WARPS = 16;
__device__ void synchronize() { __syncthreads(); }
__device__ void synchronize_warp() { __syncwarp(); }
template <typename V> __device__ V from_lane(V value, int apart) { return __shfl_xor_sync(0xffffffffu, value, apart); }
template <typename V> __device__ V at_lane(V value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// What a warp's lanes have together, each in one instruction where there is one (compute capability 8). Floats are
// compared as integers in the same order.
#if __CUDA_ARCH__ >= 800
__device__ float warp_max(float value) {
    const int bits = __float_as_int(value), highest = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(highest ^ (highest >> 31 & 0x7fffffff));
}
__device__ int warp_min(int value) { return __reduce_min_sync(0xffffffffu, value); }
__device__ int warp_count(int value) { return __reduce_add_sync(0xffffffffu, value); }
#else
__device__ float warp_max(float value) {
    for (int other = LANES / 2; other; other /= 2) value = fmaxf(value, from_lane(value, other));
    return value;
}
__device__ int warp_min(int value) {
    for (int other = LANES / 2; other; other /= 2) value = min(value, from_lane(value, other));
    return value;
}
__device__ int warp_count(int value) {
    for (int other = LANES / 2; other; other /= 2) value += from_lane(value, other);
    return value;
}
#endif
__device__ bool any_lane(bool value) { return __any_sync(0xffffffffu, value); }

// Takes a place that holds -1; returns what it held. Then: the smaller of what a place holds and a number.
__device__ int claim(int* place, int number) { return atomicCAS(place, -1, number); }
template <typename V> __device__ void lower(V* place, V number) { atomicMin(place, number); }

#ifdef BF16
typedef unsigned long long Barrier;

__device__ unsigned shared_address(const void* place) { return unsigned(__cvta_generic_to_shared(place)); }

// Two numbers as bfloat16, side by side.
__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 2 to a power; what is too small becomes zero.
__device__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

// sums += a b, a of 16 x 16 and b of 16 x 8 numbers in bfloat16, spread over the lanes of a warp.
__device__ void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Of a matrix of 8 x 8 numbers in bfloat16, lane 4g + t has numbers 2t and 2t + 1 of row g; returns them of column g.
__device__ unsigned transposed(unsigned both) {
    unsigned result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(both));
    return result;
}

// A load whose place in the program stays, of what is read once.
__device__ uint4 load_once(const uint4* place) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(place));
    return value;
}

// Copies of 16 bytes into shared memory that go on by themselves; groups of them are waited for.
__device__ void begin_copy(void* into, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(into)), "l"(from) : "memory");
}
__device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ void wait_for_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

__device__ int rank_in_cluster() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}

__device__ void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A barrier in shared memory counts the bytes that arrive; whoever waits goes on when all that were expected are there.
__device__ void make_barrier(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ void wait_for(Barrier* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Writes two numbers to the same place in a block's shared memory, and tells its barrier.
__device__ void send(float* place, float first, float second, Barrier* barrier, int rank) {
    unsigned there, told;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(told) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 :: "r"(there), "f"(first), "f"(second), "r"(told) : "memory");
}
#endif
