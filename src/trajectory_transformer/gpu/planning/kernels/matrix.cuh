// Building blocks of bf16.cu: shared memory layout, matmuls on tensor cores (mma.m16n8k16), exchange of partial sums
// between the thread blocks of a cluster, layer norm.
//
// Weights are the left operand (a strip of 16 outputs x 16 inputs), candidates the right one (16 inputs x 8 rows). Any
// order of inputs within a group of 32 is valid if both operands use the same one: lane t of four takes inputs
// 8t .. 8t + 7, so that every load is 16 bytes wide. `pack_strips` in packed.py stores weights in the order of the lanes.

constexpr int RANKS = 2;
constexpr int VECTORS = 13 * WIDTH; // per layer: norm, biases of QKV and `out`; norm, biases of `up` and `down`
constexpr int OWN_HEADS = HEADS / RANKS, OWN_WIDTH = WIDTH / RANKS, OWN_HIDDEN = 4 * WIDTH / RANKS; // per block
// Row strides, padded to avoid shared memory bank conflicts.
constexpr int STRIDE = WIDTH + 32, OWN_STRIDE = OWN_WIDTH + 32, HIDDEN_STRIDE = OWN_HIDDEN + 32, SUM_STRIDE = WIDTH + 4,
              VALUES_STRIDE = HEAD + 4;
constexpr int SPLITS = WARPS / OWN_HEADS; // warps per head; they split its tiles
constexpr int STAGES = 3;                 // tiles that a warp prefetches ahead
constexpr int HEAD_TILE = TILE * HEAD;
constexpr int PER_RANK = 12 * WIDTH * WIDTH / RANKS, OUT_OFFSET = 3 * OWN_WIDTH * WIDTH, UP_OFFSET = OUT_OFFSET + WIDTH * OWN_WIDTH,
              DOWN_OFFSET = UP_OFFSET + OWN_HIDDEN * WIDTH;
constexpr int QKV_STRIPS = 3 * OWN_WIDTH / 16; // 12: one strip for each of the first 12 warps
constexpr int PART_BYTES = ROWS * WIDTH * 4;   // bytes of one partial sum
static_assert(HEADS == 4 && HEAD == 32 && VOCABULARY <= 128, "see why_not_fused");

struct Shared { // shared memory of a thread block
    alignas(128) Scalar tiles[WARPS][STAGES][2][HEAD_TILE];
    alignas(16) Scalar activations[ROWS * STRIDE];
    alignas(16) Scalar queries[ROWS * OWN_STRIDE];
    alignas(16) Scalar attended[ROWS * OWN_STRIDE];
    alignas(16) Scalar hidden[ROWS * HIDDEN_STRIDE];
    // Keys and values of the current token: a tile whose column r belongs to candidate r.
    alignas(16) Scalar keys[OWN_HEADS * HEAD_TILE];
    alignas(16) Scalar values[OWN_HEADS * HEAD_TILE];
    alignas(16) float after_attention[RANKS][ROWS * SUM_STRIDE]; // partial sums of both blocks
    alignas(16) float after_mlp[2 * RANKS][ROWS * SUM_STRIDE];   // partial sums of both blocks, two each
    Barrier arrived[2];                                          // the other block's partial sums have arrived
    alignas(16) float split_max[ROWS][OWN_HEADS][SPLITS], split_sum[ROWS][OWN_HEADS][SPLITS], split_values[WARPS][ROWS][VALUES_STRIDE];
    alignas(16) float vectors[LAYERS * VECTORS + 2 * WIDTH];
    float logits[ROWS * SUM_STRIDE], noise[ROWS][VOCABULARY];
    Group group;
    int candidates[ROWS];
    CandidateState states[ROWS];
    int num_tiles;
};

// Assignment of warps. First half: one row each (embedding, layer norm, sampling) and a strip of the head. Second half:
// a strip of `out`. For `down`, each half of the warps sums over half of the inputs.
__device__ int lane_index() { return thread % LANES; }
__device__ int warp_index() { return thread / LANES; }
__device__ int warp_half() { return thread / LANES / 8; }
__device__ int strip_index() { return thread / LANES % 8; }
__device__ int row_index() { return strip_index(); }
__device__ bool owns_row() { return warp_half() == 0; }

__device__ Scalar round_to(float value) { return Scalar(pack(value, 0.0f)); }

// GELU with an absolute error below 2e-7: erf by Abramowitz and Stegun, 7.1.26.
__device__ float fast_gelu(float value) {
    const float x = fabsf(value) * 0.70710678f;
    const float t = __fdividef(1.0f, 1.0f + 0.3275911f * x);
    const float rest = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    return 0.5f * value * (1.0f + copysignf(1.0f - rest * exp2_approx(-1.4426950408889634f * x * x), value));
}

// Prefetches pieces FIRST .. FIRST + COUNT - 1 of this lane's part of a strip; every 32 inputs are two pieces.
template <int FIRST, int COUNT> __device__ void prefetch(uint4 (&weights)[8], const Scalar* matrix, int first_piece) {
    const uint4* address = reinterpret_cast<const uint4*>(matrix) + first_piece * LANES + thread % LANES;
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i) weights[i] = load_streaming(address + i * LANES);
}

// Matmul of one strip: rows [ROWS][stride] -> sums of outputs g (0, 1) and g + 8 (2, 3) for candidates 2t and 2t + 1.
template <int COUNT> __device__ void matmul_strip(const uint4 (&weights)[8], const Scalar* rows, int stride, float (&sums)[4]) {
    const int lane = thread % LANES, g = lane / 4, t = lane % 4;
    float more[4] = {};
#pragma unroll
    for (int pair = 0; pair < COUNT / 2; ++pair) {
        const uint4 b = *reinterpret_cast<const uint4*>(rows + g * stride + pair * 32 + 8 * t);
        const uint4 first = weights[2 * pair], second = weights[2 * pair + 1];
        mma(sums, first.x, first.y, first.z, first.w, b.x, b.y);
        mma(more, second.x, second.y, second.z, second.w, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += more[i];
}

// Partial sums store outputs g and g + 8 next to each other. Returns the output at an index of such a row.
__device__ int feature_of(int index) { return (index & ~15) + index % 16 / 2 + index % 2 * 8; }

// Writes a strip of partial sums to the shared memory of both blocks. The other block's barrier counts the bytes, so it
// needs no further synchronisation.
__device__ void broadcast_sums(const float (&sums)[4], float* part, Barrier* barrier, int strip, int rank) {
    const int lane = thread % LANES, g = lane / 4, t = lane % 4;
    float* address = part + 2 * t * SUM_STRIDE + strip * 16 + 2 * g;
    store_remote(address, sums[0], sums[2], barrier, 1 - rank);
    store_remote(address + SUM_STRIDE, sums[1], sums[3], barrier, 1 - rank);
    *reinterpret_cast<float2*>(address) = make_float2(sums[0], sums[2]);
    *reinterpret_cast<float2*>(address + SUM_STRIDE) = make_float2(sums[1], sums[3]);
}

// Four elements of a candidate's residual stream, in the order of `broadcast_sums`. A warp holds one candidate.
struct RowFragment {
    float x[4];

    __device__ void embed(const Run& run, int env, int token, int position) {
        const long long offset = run.offsets[position];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = embedding_element(run, env, token, position, offset, feature_of(lane_index() * 4 + i));
    }

    __device__ void add(const float* weights) {
        const float4 four = reinterpret_cast<const float4*>(weights)[thread % LANES];
        x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }

    // Sum of COUNT partial sums for this warp's row.
    template <int COUNT> static __device__ RowFragment sum_parts(const float (*parts)[ROWS * SUM_STRIDE]) {
        RowFragment share{};
#pragma unroll
        for (int part = 0; part < COUNT; ++part) share.add(parts[part] + warp_index() * SUM_STRIDE);
        return share;
    }

    // Adds the bias and the partial sums of both blocks. The two sums are added to each other first, so that both
    // blocks get bit-identical results.
    template <int COUNT>
    __device__ void add_exchanged(const float (*parts)[ROWS * SUM_STRIDE], const float* bias, Barrier* arrived, unsigned parity, int rank) {
        add(bias);
        const RowFragment own = sum_parts<COUNT>(parts + rank * COUNT);
        wait_barrier(arrived, parity);
        const RowFragment other = sum_parts<COUNT>(parts + (1 - rank) * COUNT);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] += own.x[i] + other.x[i];
    }

    // Writes the layer norm in bfloat16 to activations, the input of the next matmul.
    __device__ void normalize(const float* norm, Scalar* activations) const {
        float sum = (x[0] + x[1]) + (x[2] + x[3]), squares = (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
#pragma unroll
        for (int other = LANES / 2; other; other /= 2) sum += shuffle_xor(sum, other), squares += shuffle_xor(squares, other);
        const float mean = sum / WIDTH, scale = rsqrtf(fmaxf(squares / WIDTH - mean * mean, 0.0f) + 1e-5f);
        const float4 weight = reinterpret_cast<const float4*>(norm)[thread % LANES];
        const float4 bias = reinterpret_cast<const float4*>(norm + WIDTH)[thread % LANES];
        unsigned* address = reinterpret_cast<unsigned*>(activations + thread / LANES * STRIDE + feature_of(thread % LANES * 4));
        address[0] = pack((x[0] - mean) * scale * weight.x + bias.x, (x[2] - mean) * scale * weight.z + bias.z);
        address[4] = pack((x[1] - mean) * scale * weight.y + bias.y, (x[3] - mean) * scale * weight.w + bias.w);
    }
};
