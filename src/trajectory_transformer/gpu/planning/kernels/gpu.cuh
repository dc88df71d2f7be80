// GPU primitives that the kernels use. fibers.cuh implements all of them on a CPU, serial.cuh those for a single
// thread.

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(512, 1) name
#define CLUSTER_KERNEL(ranks, name) extern "C" __global__ void __cluster_dims__(ranks, 1, 1) __launch_bounds__(512, 1) name
#define block_index int(blockIdx.x)
// Returns `value`, opaque to the optimizer. Otherwise the compiler hoists address computations that depend on the
// thread index out of all loops and keeps their results in registers that are needed for weights.
__device__ int opaque_copy(int value) {
    asm volatile("" : "+r"(value));
    __builtin_assume(value >= 0 && value < 512);
    return value;
}
#define thread opaque_copy(int(threadIdx.x))
extern __shared__ __align__(128) char shared_bytes[];
constexpr int LANES = 32, WARPS = 16;
__device__ void synchronize() { __syncthreads(); }
__device__ void synchronize_warp() { __syncwarp(); }
template <typename V> __device__ V shuffle_xor(V value, int apart) { return __shfl_xor_sync(0xffffffffu, value, apart); }
template <typename V> __device__ V shuffle(V value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

// Warp reductions. Compute capability 8 and above has one instruction for each; floats are compared as integers whose
// order is the same.
#if __CUDA_ARCH__ >= 800
__device__ float warp_max(float value) {
    const int bits = __float_as_int(value), highest = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(highest ^ (highest >> 31 & 0x7fffffff));
}
__device__ int warp_min(int value) { return __reduce_min_sync(0xffffffffu, value); }
__device__ int warp_count(int value) { return __reduce_add_sync(0xffffffffu, value); }
#else
__device__ float warp_max(float value) {
    for (int other = LANES / 2; other; other /= 2) value = fmaxf(value, shuffle_xor(value, other));
    return value;
}
__device__ int warp_min(int value) {
    for (int other = LANES / 2; other; other /= 2) value = min(value, shuffle_xor(value, other));
    return value;
}
__device__ int warp_count(int value) {
    for (int other = LANES / 2; other; other /= 2) value += shuffle_xor(value, other);
    return value;
}
#endif
__device__ bool any_lane(bool value) { return __any_sync(0xffffffffu, value); }

// claim: stores `number` if the address holds -1, and returns the previous value. atomic_min: lowers a value to
// `number`.
__device__ int claim(int* address, int number) { return atomicCAS(address, -1, number); }
template <typename V> __device__ void atomic_min(V* address, V number) { atomicMin(address, number); }

#ifdef BF16
typedef unsigned long long Barrier;

__device__ unsigned shared_address(const void* address) { return unsigned(__cvta_generic_to_shared(address)); }

// Packs two floats as bfloat16x2.
__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 2^exponent; denormal results are flushed to zero.
__device__ float exp2_approx(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

// sums += a b on tensor cores: a is 16 x 16, b is 16 x 8, both bfloat16, in the fragment layout of mma.m16n8k16.
__device__ void mma(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 bfloat16 matrix: lane 4g + t passes elements 2t and 2t + 1 of row g and gets those of column g.
__device__ unsigned transpose_8x8(unsigned both) {
    unsigned result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(both));
    return result;
}

// Read-only load that bypasses L1. `volatile` keeps the compiler from moving this prefetch.
__device__ uint4 load_streaming(const uint4* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w) : "l"(address));
    return value;
}

// Asynchronous 16-byte copies from global to shared memory (cp.async), committed and awaited in groups.
__device__ void copy_async(void* into, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(into)), "l"(from) : "memory");
}
__device__ void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ void wait_group() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }

__device__ int rank_in_cluster() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return int(rank);
}

__device__ void synchronize_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mbarrier in shared memory that counts the bytes of asynchronous stores; wait_barrier returns when all have arrived.
__device__ void init_barrier(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void expect_bytes(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ void wait_barrier(Barrier* barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Stores two floats at the same address in the shared memory of another block of the cluster, and signals its barrier.
__device__ void store_remote(float* address, float first, float second, Barrier* barrier, int rank) {
    unsigned remote, remote_barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(address)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 :: "r"(remote), "f"(first), "f"(second), "r"(remote_barrier) : "memory");
}
#endif
