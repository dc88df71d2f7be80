// What both precisions share: sizes, the parameters of a run, warp sums, noise, drawing a token.
//
// Sizes come from the compiler's command line: WIDTH, HEADS, LAYERS, VOCABULARY (bins and the stop token), and BF16 where
// products are computed in bfloat16.

constexpr int THREADS = LANES * WARPS;
constexpr int ROWS = 8;             // candidates of one block, at most: the columns of one matrix instruction
constexpr int TILE = 16;            // columns of keys and values that are kept, read and multiplied together
constexpr int HEAD = WIDTH / HEADS; // 32, checked by the caller
constexpr int MAX_SEGMENTS = 64;
constexpr int VOCABULARY_ROOM = (VOCABULARY + 127) / 128 * 128;
constexpr float LOWEST = -1e30f;
#define ROOM_BYTES(room) (int(sizeof(room) + 127) / 128 * 128)

#ifdef BF16
typedef unsigned short Number; // bfloat16, as bits
#else
typedef float Number;
#endif

// A run of slots for every candidate. Keys and values live in segments: the prompt (0), then blocks of at most one
// transition's columns. Within a segment a row holds its tiles, each [HEADS][TILE][HEAD] keys or [HEADS][HEAD][TILE]
// values, so that later tokens read whole tiles.
struct Run {
    const float* token_embedding;
    const float* position_embedding;
    const long long* offsets;       // [positions], where the embeddings of a position's slot begin
    const unsigned char* readable;  // [positions], whether later tokens may attend to it
    const float* context;           // [E, WIDTH] added to every embedding, or null
    const Number* weights;          // of all layers, in the order they are read
    const float* vectors;           // per layer: norm, biases, norm, biases; then the last norm
    const Number* heads;            // [slots], each as wide as VOCABULARY_ROOM
    const long long* given;         // [E, K, G] tokens not read yet
    const int* order;               // [E, K], in which candidates are dealt out to blocks
    const int* ancestors;           // [E, K, MAX_SEGMENTS], rows of every segment that a candidate continues
    void* lists;                    // [groups of all environments, max_tiles], room that bfloat16 lists its tiles in
    const Number* prompt_keys;      // [LAYERS, rows, tiles, WIDTH * TILE]
    const Number* prompt_values;
    Number* keys;                   // [segments, LAYERS, rows, tiles, WIDTH * TILE]
    Number* values;
    const long long* noise;         // [E] keys of the noise; null takes the most likely tokens
    const float* worths;            // [S, VOCABULARY - 1], what tokens are worth
    long long* tokens;              // [E, K, S] drawn
    float* log_prob;                // [E, K, S]
    float* worth;                   // [E, K, S] or null
    float* logits;                  // [E, K, VOCABULARY] instead of drawing, or null
    long long stop_embedding;       // row of the stop token's embedding
    long long prompt_stride;        // between layers, in numbers
    long long layer_stride;         // between layers of a segment
    long long segment_stride;
    int segments[MAX_SEGMENTS];     // which places hold the committed ones, from 1 on
    int depth;                      // committed segments after the prompt
    int current;                    // place of the segment being written
    int prompt_tiles, prompt_columns;
    int tiles, capacity;            // of a block
    int columns;                    // of the current segment, so far
    int candidates, group, groups;  // K, candidates of one group, groups of one environment
    int all_groups, each, max_tiles; // groups of all environments, of one cluster, tiles of one group at most
    int num_given, num_slots;       // G, S
    int start;                      // position of the first token to read
    int head_period, head_first;    // slots of a transition; slot predicted first
    int noise_slots, noise_first;   // slots of the whole run that the noise was made for, and where this part begins
    int allow_stop, top_k, estimate; // estimate: 0 none, 1 mean, 2 sampled, 3 percentile
    float temperature, dropped;     // dropped: 1 - nucleus, negative to keep all
    float share;                    // for percentiles
};

__device__ float warp_sum(float value) {
    for (int other = LANES / 2; other; other /= 2) value += from_lane(value, other);
    return value;
}

// The same numbers as `Gumbel.slot` in sampling.py: 24 bits of a hash of key and index.
__device__ float gumbel(unsigned long long key, unsigned long long index) {
    unsigned long long z = key + (index + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const float uniform = (float(z >> 40) + 0.5f) * 0x1p-24f;
    return -logf(-logf(uniform));
}

constexpr int SHARE = (VOCABULARY + LANES - 1) / LANES; // tokens of one lane

__device__ float highest_of(const float (&own)[SHARE]) {
    float top = -INFINITY;
    for (int i = 0; i < SHARE; ++i) top = fmaxf(top, own[i]);
    return warp_max(top);
}

// What the filters keep of a warp's scaled logits; the rest becomes -infinity. The likeliest are taken one by one, as
// few are kept as a rule.
__device__ void filter(const Run& run, float (&own)[SHARE]) {
    const float top = highest_of(own);
    if (run.top_k == 1) {
        for (int i = 0; i < SHARE; ++i) own[i] = own[i] == top ? top : -INFINITY;
    } else if (run.top_k < VOCABULARY) {
        float lowest = INFINITY; // of those kept so far
        for (int num_kept = 0; num_kept < run.top_k;) {
            float next = -INFINITY;
            int equal = 0;
            for (int i = 0; i < SHARE; ++i) next = own[i] < lowest ? fmaxf(next, own[i]) : next;
            lowest = warp_max(next);
            if (lowest == -INFINITY) break;
            for (int i = 0; i < SHARE; ++i) equal += own[i] == lowest;
            num_kept += warp_count(equal);
        }
        for (int i = 0; i < SHARE; ++i) own[i] = own[i] >= lowest ? own[i] : -INFINITY;
    }
    if (run.dropped < 0.0f) return;
    float total = 0.0f, prob[SHARE];
    for (int i = 0; i < SHARE; ++i) total += prob[i] = expf(own[i] - top);
    total = warp_sum(total);
    const float wanted = (1.0f - run.dropped) * total;
    float lowest = INFINITY, mass = 0.0f;
    while (mass < wanted) {
        float next = 0.0f;
        int equal = 0;
        for (int i = 0; i < SHARE; ++i) next = prob[i] < lowest ? fmaxf(next, prob[i]) : next;
        lowest = warp_max(next);
        if (lowest == 0.0f) break;
        for (int i = 0; i < SHARE; ++i) equal += prob[i] == lowest;
        mass += lowest * float(warp_count(equal));
    }
    for (int i = 0; i < SHARE; ++i) own[i] = prob[i] >= lowest ? own[i] : -INFINITY;
}

// What a token of a discretised scalar is worth under the predicted distribution.
__device__ float estimate(const Run& run, const float* logits, const float* worths, float log_total, int token, int lane) {
    if (run.estimate == 2) return token < VOCABULARY - 1 ? worths[token] : 0.0f;
    float result = 0.0f;
    if (run.estimate == 1) {
        for (int v = lane; v < VOCABULARY - 1; v += LANES) result += expf(logits[v] - log_total) * worths[v];
        return warp_sum(result);
    }
    // The smallest worth with the share of the mass at or below it; the stop token counts as zero.
    float smallest = INFINITY, largest = -INFINITY;
    for (int v = lane; v < VOCABULARY; v += LANES) {
        const float own = v < VOCABULARY - 1 ? worths[v] : 0.0f;
        float mass = 0.0f;
        for (int other = 0; other < VOCABULARY; ++other) {
            const float worth = other < VOCABULARY - 1 ? worths[other] : 0.0f;
            mass += worth <= own ? expf(logits[other] - log_total) : 0.0f;
        }
        if (mass >= run.share) smallest = fminf(smallest, own);
        largest = fmaxf(largest, own);
    }
    smallest = -warp_max(-smallest);
    largest = warp_max(largest);
    return smallest < INFINITY ? smallest : largest;
}

// The noise of one token that a candidate may draw in a slot.
__device__ float noise_of(const Run& run, int env, int candidate, int slot, int token) {
    return gumbel(run.noise[env], ((long long)candidate * run.noise_slots + run.noise_first + slot) * VOCABULARY + token);
}

// Draws the token of one candidate in one slot by the Gumbel-max trick; one warp. Returns it to every lane. `noise` has
// that of the tokens, where there is any.
template <typename Noise>
__device__ int draw(const Run& run, const float* logits, Noise noise, int env, int candidate, int slot) {
    const int lane = thread % LANES;
    float own[SHARE], total = 0.0f;
    for (int i = 0; i < SHARE; ++i) own[i] = lane + i * LANES < VOCABULARY ? logits[lane + i * LANES] : -INFINITY;
    const float top = highest_of(own);
    for (int i = 0; i < SHARE; ++i) total += expf(own[i] - top);
    const float log_total = top + logf(warp_sum(total));

    const bool noisy = run.noise != nullptr;
    for (int i = 0; i < SHARE; ++i) {
        if (lane + i * LANES == VOCABULARY - 1 && !run.allow_stop) own[i] = -INFINITY;
        if (noisy) own[i] /= run.temperature;
    }
    if (noisy) filter(run, own);
    float best = -INFINITY;
    int token = VOCABULARY;
    for (int i = 0; i < SHARE; ++i) {
        const int v = lane + i * LANES;
        if (own[i] == -INFINITY) continue;
        const float value = noisy ? own[i] + noise(v) : own[i];
        if (value > best) best = value, token = v;
    }
    const float highest = warp_max(best);
    token = warp_min(best == highest ? token : VOCABULARY);
    const long long place = ((long long)env * run.candidates + candidate) * run.num_slots + slot;
    if (lane == 0) {
        run.tokens[place] = token;
        run.log_prob[place] = logits[token] - log_total;
    }
    if (run.worth) {
        const float worth = estimate(run, logits, run.worths + slot * (VOCABULARY - 1), log_total, token, lane);
        if (lane == 0) run.worth[place] = worth;
    }
    return token;
}

// Ends a slot of one candidate: draws a token, or hands out the logits where these were asked for. One warp.
template <typename Noise>
__device__ int conclude(const Run& run, const float* logits, Noise noise, int env, int candidate, int slot) {
    if (!run.logits) return draw(run, logits, noise, env, candidate, slot);
    float* place = run.logits + ((long long)env * run.candidates + candidate) * VOCABULARY;
    for (int v = thread % LANES; v < VOCABULARY; v += LANES) place[v] = logits[v];
    return 0;
}

// One number of what a token at a position is embedded as; the position's slot has its embeddings from `offset` on.
__device__ float embedded(const Run& run, int env, int token, int position, long long offset, int i) {
    const long long index = token == VOCABULARY - 1 ? run.stop_embedding : token + offset;
    const float context = run.context ? run.context[(long long)env * WIDTH + i] : 0.0f;
    return run.token_embedding[index * WIDTH + i] + run.position_embedding[position * WIDTH + i] + context;
}

// Candidates of one environment that are worked on together.
struct Group {
    int env, first, rows; // rows of them, at most ROWS, from `first` on in the order
    long long first_row;  // of the environment's candidates among those of all

    __device__ Group(const Run& run, int number) {
        env = number / run.groups;
        first = number % run.groups * run.group;
        rows = run.candidates - first < run.group ? run.candidates - first : run.group;
        first_row = (long long)env * run.candidates;
    }

    __device__ int candidate(const Run& run, int row) const { return row < rows ? run.order[first_row + first + row] : 0; }

    __device__ int given(const Run& run, int candidate, int step) const {
        return int(run.given[(first_row + candidate) * run.num_given + step]);
    }
};
