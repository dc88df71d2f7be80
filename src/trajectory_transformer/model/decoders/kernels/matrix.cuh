// What bf16.cu is made of: a block's shared memory, products on the matrix units (mma.m16n8k16), sums that travel between
// blocks, norms.
//
// Weights are the left factor (16 outputs, a strip, x 16 inputs), candidates the right one (16 inputs x 8 rows). The
// order of inputs within 32 is free as long as both factors agree: lane t of four takes inputs 8t .. 8t + 7, so that each
// of its loads is 16 bytes wide. Weights are laid out by the caller in the order in which lanes read them.

constexpr int SIDES = 2;              // blocks that share a layer
constexpr int RANKS = SIDES * LAYERS; // blocks of a cluster
constexpr int VECTORS = 13 * WIDTH; // of a layer: norm, biases of queries, keys and values, of `out`; norm, `up`, `down`
constexpr int OWN_HEADS = HEADS / SIDES, OWN_WIDTH = WIDTH / SIDES, OWN_HIDDEN = 4 * WIDTH / SIDES; // of one block
// Strides that keep the banks of shared memory apart.
constexpr int STRIDE = WIDTH + 32, OWN_STRIDE = OWN_WIDTH + 32, HIDDEN_STRIDE = OWN_HIDDEN + 32, SUMS = WIDTH + 4;
constexpr int SPLITS = WARPS / OWN_HEADS; // warps that share a head's columns
constexpr int AHEAD = 2;                  // tiles that a warp has on their way
constexpr int HEAD_TILE = TILE * HEAD;
constexpr int PER_SIDE = 12 * WIDTH * WIDTH / SIDES, OUT_PLACE = 3 * OWN_WIDTH * WIDTH, UP_PLACE = OUT_PLACE + WIDTH * OWN_WIDTH,
              DOWN_PLACE = UP_PLACE + OWN_HIDDEN * WIDTH;
constexpr int QKV_STRIPS = 3 * OWN_WIDTH / 16; // 12: one for each of as many warps
constexpr int STRIPS = WIDTH / 16;             // 8, of `out`, `down` and heads
constexpr int DRAWN_EACH = 4;                  // groups that one layer draws tokens for, at most
constexpr int MAX_EACH = DRAWN_EACH * LAYERS;  // groups of one cluster
constexpr int PART = ROWS * WIDTH * 4;         // bytes of one part of the sums
static_assert(HEADS == 4 && HEAD == 32 && VOCABULARY <= 128, "see why_not_fused");

struct Box { // for sums that come in two parts, one from each side
    alignas(16) float parts[SIDES][ROWS * SUMS];
    Barrier arrived;
};

struct Room { // shared memory of a block
    alignas(128) Number tiles[WARPS][AHEAD][2][HEAD_TILE];
    alignas(16) uint4 qkv[QKV_STRIPS * 8 * LANES];
    alignas(16) uint4 down[STRIPS][12][LANES]; // second halves of the inputs, and of the first what is not in registers
    alignas(16) Number activations[ROWS * STRIDE];
    alignas(16) Number queries[ROWS * OWN_STRIDE];
    alignas(16) Number attended[ROWS * OWN_STRIDE];
    // Keys and values of the token being read: a tile whose column r belongs to candidate r.
    alignas(16) Number keys[OWN_HEADS * HEAD_TILE];
    alignas(16) Number values[OWN_HEADS * HEAD_TILE];
    Box before, finished;                             // from the layer before; from the last one, to draw tokens
    alignas(16) float own_part[ROWS * SUMS];          // of the sums after attention
    alignas(16) float other_part[2][ROWS * SUMS];     // of the other side, which may be one group ahead
    Barrier exchanged[2];                             // both are there
    Barrier taken, finished_taken[LAYERS];            // the next layer's box is free again; those of who draws
    Barrier drawn[MAX_EACH];                          // a group's tokens are there
    float tokens[MAX_EACH][ROWS][2], nothing[2];
    union {
        struct { float tops[WARPS][ROWS], totals[WARPS][ROWS], found[WARPS][ROWS][HEAD + 4]; }; // until `attended` is there
        struct {                                                                            // after that
            alignas(16) Number hidden[ROWS * HIDDEN_STRIDE];
            alignas(16) float x[ROWS * SUMS];
            alignas(16) float halves[STRIPS][LANES][4];
            float noise[ROWS][VOCABULARY]; // made while others still need the rest
        };
        float logits[ROWS * SUMS];
    };
    // As handed out, see `feature_of`, but those of queries, keys, values and of `up`.
    alignas(16) float first_norm[2 * WIDTH], qkv_bias[3 * OWN_WIDTH], out_bias[WIDTH], second_norm[2 * WIDTH], up_bias[OWN_HIDDEN],
        down_bias[WIDTH], last_norm[2 * WIDTH];
    int listed[WARPS][AHEAD]; // rows and columns of the tiles on their way
    Group groups[MAX_EACH];
    int candidates[MAX_EACH][ROWS], num_tiles[MAX_EACH];
    Tally tallies[DRAWN_EACH][ROWS];
};

__device__ Number round_to(float value) { return Number(pack(value, 0.0f)); }

// Within 2e-7 of the exact one: erf approximated as by Hastings (Abramowitz and Stegun, 7.1.26).
__device__ float quick_gelu(float value) {
    const float x = fabsf(value) * 0.70710678f;
    const float t = __fdividef(1.0f, 1.0f + 0.3275911f * x);
    const float rest = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    return 0.5f * value * (1.0f + copysignf(1.0f - rest * exp2f(-1.4426950408889634f * x * x), value));
}

// Asks memory for a lane's share of a strip, from a piece on: there are two for every 32 inputs.
template <int COUNT> __device__ void fetch(uint4 (&numbers)[COUNT], const Number* matrix, int first_piece) {
    const uint4* place = reinterpret_cast<const uint4*>(matrix) + first_piece * LANES + thread % LANES;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) numbers[i] = load_once(place + i * LANES);
}

// One strip of a product: rows [ROWS][stride] -> sums of outputs g (0, 1) and g + 8 (2, 3) for candidates 2t and 2t + 1.
template <int COUNT> __device__ void multiply(const uint4 (&numbers)[COUNT], const Number* rows, int stride, float (&sums)[4]) {
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

// Sums are handed out with outputs g and g + 8 side by side: the place of a number in a row, and whose it is.
__device__ int place_of(int strip) { return strip * 16 + thread % LANES / 4 * 2; }
__device__ int feature_of(int place) { return (place & ~15) + place % 16 / 2 + place % 2 * 8; }

// Puts a strip of sums into a block's shared memory. The bytes are counted by its barrier, so that nothing else has to be
// waited for.
__device__ void hand_out(const float (&sums)[4], float* part, Barrier* barrier, int strip, int rank) {
    float* place = part + thread % 4 * 2 * SUMS + place_of(strip);
    send(place, sums[0], sums[2], barrier, rank);
    send(place + SUMS, sums[1], sums[3], barrier, rank);
}

// The four numbers of a row that a lane takes care of. A warp has a row.
struct Share {
    float x[4];

    __device__ void add(const float* numbers) {
        const float4 four = reinterpret_cast<const float4*>(numbers)[thread % LANES];
        x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }

    // The layer norm, rounded, as the next product's input.
    __device__ void normalize(const float* norm, Number* activations) const {
        float sum = (x[0] + x[1]) + (x[2] + x[3]), squares = (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
#pragma unroll
        for (int other = LANES / 2; other; other /= 2) sum += from_lane(sum, other), squares += from_lane(squares, other);
        const float mean = sum / WIDTH, scale = rsqrtf(fmaxf(squares / WIDTH - mean * mean, 0.0f) + 1e-5f);
        Share result{};
        result.add(norm + WIDTH);
        const float4 weight = reinterpret_cast<const float4*>(norm)[thread % LANES];
        const float weights[4] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) result.x[i] += (x[i] - mean) * scale * weights[i];
        unsigned* place = reinterpret_cast<unsigned*>(activations + thread / LANES * STRIDE + feature_of(thread % LANES * 4));
        place[0] = pack(result.x[0], result.x[2]);
        place[4] = pack(result.x[1], result.x[3]);
    }
};
