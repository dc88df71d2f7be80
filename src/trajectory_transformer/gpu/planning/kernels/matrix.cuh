// What bf16.cu is made of: a block's shared memory, products on the matrix units (mma.m16n8k16), sums that travel between
// blocks, norms.
//
// Weights are the left factor (16 outputs, a strip, x 16 inputs), candidates the right one (16 inputs x 8 rows). The
// order of inputs within 32 is free as long as both factors agree: lane t of four takes inputs 8t .. 8t + 7, so that each
// of its loads is 16 bytes wide. Weights are laid out by the caller in the order in which lanes read them.

constexpr int RANKS = 2;
constexpr int VECTORS = 13 * WIDTH; // of a layer: norm, biases of queries, keys and values, of `out`; norm, `up`, `down`
constexpr int OWN_HEADS = HEADS / RANKS, OWN_WIDTH = WIDTH / RANKS, OWN_HIDDEN = 4 * WIDTH / RANKS; // of one block
// Strides that keep the banks of shared memory apart.
constexpr int STRIDE = WIDTH + 32, OWN_STRIDE = OWN_WIDTH + 32, HIDDEN_STRIDE = OWN_HIDDEN + 32, SUMS = WIDTH + 4,
              FOUND_STRIDE = HEAD + 4;
constexpr int SPLITS = WARPS / OWN_HEADS; // warps that share a head's columns
constexpr int AHEAD = 3;                  // tiles that a warp has on their way
constexpr int HEAD_TILE = TILE * HEAD;
constexpr int PER_RANK = 12 * WIDTH * WIDTH / RANKS, OUT_PLACE = 3 * OWN_WIDTH * WIDTH, UP_PLACE = OUT_PLACE + WIDTH * OWN_WIDTH,
              DOWN_PLACE = UP_PLACE + OWN_HIDDEN * WIDTH;
constexpr int QKV_STRIPS = 3 * OWN_WIDTH / 16; // 12: one for each of as many warps
constexpr int PART = ROWS * WIDTH * 4;         // bytes of one part of the sums
static_assert(HEADS == 4 && HEAD == 32 && VOCABULARY <= 128, "see why_not_fused");

struct Room { // shared memory of a block
    alignas(128) Number tiles[WARPS][AHEAD][2][HEAD_TILE];
    alignas(16) Number activations[ROWS * STRIDE];
    alignas(16) Number queries[ROWS * OWN_STRIDE];
    alignas(16) Number attended[ROWS * OWN_STRIDE];
    alignas(16) Number hidden[ROWS * HIDDEN_STRIDE];
    // Keys and values of the token being read: a tile whose column r belongs to candidate r.
    alignas(16) Number keys[OWN_HEADS * HEAD_TILE];
    alignas(16) Number values[OWN_HEADS * HEAD_TILE];
    alignas(16) float after_attention[RANKS][ROWS * SUMS];      // parts of sums from both blocks
    alignas(16) float after_perceptron[2 * RANKS][ROWS * SUMS]; // each in two halves
    Barrier arrived[2];                                         // those of the other block are there
    alignas(16) float tops[ROWS][OWN_HEADS][SPLITS], totals[ROWS][OWN_HEADS][SPLITS], found[WARPS][ROWS][FOUND_STRIDE];
    alignas(16) float vectors[LAYERS * VECTORS + 2 * WIDTH];
    float logits[ROWS * SUMS], noise[ROWS][VOCABULARY];
    Group group;
    int candidates[ROWS];
    Tally tallies[ROWS];
    int num_tiles;
};

// Half of the warps have a row each, which they embed, normalize and draw the tokens of, and strips of the heads; the other
// half have strips of `out`. Of `down`, the halves of the warps have a half of the inputs each.
__device__ int own_lane() { return thread % LANES; }
__device__ int own_warp() { return thread / LANES; }
__device__ int own_half() { return thread / LANES / 8; }
__device__ int own_strip() { return thread / LANES % 8; }
__device__ int own_row() { return own_strip(); }
__device__ bool has_row() { return own_half() == 0; }

__device__ Number round_to(float value) { return Number(pack(value, 0.0f)); }

// Within 2e-7 of the exact one: erf approximated as by Hastings (Abramowitz and Stegun, 7.1.26).
__device__ float quick_gelu(float value) {
    const float x = fabsf(value) * 0.70710678f;
    const float t = __fdividef(1.0f, 1.0f + 0.3275911f * x);
    const float rest = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    return 0.5f * value * (1.0f + copysignf(1.0f - rest * power_of_two(-1.4426950408889634f * x * x), value));
}

// Asks memory for pieces of a lane's share of a strip: there are two for every 32 inputs.
template <int FIRST, int COUNT> __device__ void fetch(uint4 (&numbers)[8], const Number* matrix, int first_piece) {
    const uint4* place = reinterpret_cast<const uint4*>(matrix) + first_piece * LANES + thread % LANES;
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i) numbers[i] = load_once(place + i * LANES);
}

// One strip of a product: rows [ROWS][stride] -> sums of outputs g (0, 1) and g + 8 (2, 3) for candidates 2t and 2t + 1.
template <int COUNT> __device__ void multiply(const uint4 (&numbers)[8], const Number* rows, int stride, float (&sums)[4]) {
    const int lane = thread % LANES, g = lane / 4, t = lane % 4;
    float more[4] = {};
#pragma unroll
    for (int pair = 0; pair < COUNT / 2; ++pair) {
        const uint4 b = *reinterpret_cast<const uint4*>(rows + g * stride + pair * 32 + 8 * t);
        const uint4 first = numbers[2 * pair], second = numbers[2 * pair + 1];
        multiply_add(sums, first.x, first.y, first.z, first.w, b.x, b.y);
        multiply_add(more, second.x, second.y, second.z, second.w, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += more[i];
}

// Sums are handed out with outputs g and g + 8 side by side; whose number it is that comes to lie at a place of a row.
__device__ int feature_of(int place) { return (place & ~15) + place % 16 / 2 + place % 2 * 8; }

// Puts a strip's part of sums to the same place in both blocks. The bytes are counted by the barrier of the other one, so
// that nothing else has to be waited for there.
__device__ void hand_out(const float (&sums)[4], float* part, Barrier* barrier, int strip, int rank) {
    const int lane = thread % LANES, g = lane / 4, t = lane % 4;
    float* place = part + 2 * t * SUMS + strip * 16 + 2 * g;
    send(place, sums[0], sums[2], barrier, 1 - rank);
    send(place + SUMS, sums[1], sums[3], barrier, 1 - rank);
    *reinterpret_cast<float2*>(place) = make_float2(sums[0], sums[2]);
    *reinterpret_cast<float2*>(place + SUMS) = make_float2(sums[1], sums[3]);
}

// The four numbers of a candidate that a lane takes care of, side by side as they are handed out. A warp has a candidate.
struct Share {
    float x[4];

    __device__ void embed(const Run& run, int env, int token, int position) {
        const long long offset = run.offsets[position];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = embedded(run, env, token, position, offset, feature_of(own_lane() * 4 + i));
    }

    __device__ void add(const float* numbers) {
        const float4 four = reinterpret_cast<const float4*>(numbers)[thread % LANES];
        x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }

    // What parts of sums are together, in this warp's row.
    template <int COUNT> static __device__ Share of(const float (*parts)[ROWS * SUMS]) {
        Share share{};
#pragma unroll
        for (int part = 0; part < COUNT; ++part) share.add(parts[part] + own_warp() * SUMS);
        return share;
    }

    // Adds a bias and the parts of both blocks. Both must get the same, so what each has summed up is added last.
    template <int COUNT>
    __device__ void exchange(const float (*parts)[ROWS * SUMS], const float* bias, Barrier* arrived, unsigned parity, int rank) {
        add(bias);
        const Share own = of<COUNT>(parts + rank * COUNT);
        wait_for(arrived, parity);
        const Share other = of<COUNT>(parts + (1 - rank) * COUNT);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] += own.x[i] + other.x[i];
    }

    // The layer norm, rounded, as the next product's input.
    __device__ void normalize(const float* norm, Number* activations) const {
        float sum = (x[0] + x[1]) + (x[2] + x[3]), squares = (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
#pragma unroll
        for (int other = LANES / 2; other; other /= 2) sum += from_lane(sum, other), squares += from_lane(squares, other);
        const float mean = sum / WIDTH, scale = rsqrtf(fmaxf(squares / WIDTH - mean * mean, 0.0f) + 1e-5f);
        const float4 weight = reinterpret_cast<const float4*>(norm)[thread % LANES];
        const float4 bias = reinterpret_cast<const float4*>(norm + WIDTH)[thread % LANES];
        unsigned* place = reinterpret_cast<unsigned*>(activations + thread / LANES * STRIDE + feature_of(thread % LANES * 4));
        place[0] = pack((x[0] - mean) * scale * weight.x + bias.x, (x[2] - mean) * scale * weight.z + bias.z);
        place[4] = pack((x[1] - mean) * scale * weight.y + bias.y, (x[3] - mean) * scale * weight.w + bias.w);
    }
};
