// Code shared by both precisions: sizes, kernel parameters, warp sums, noise, sampling.
//
// The compiler's command line defines the sizes: WIDTH, HEADS, LAYERS, VOCABULARY (bins plus the stop token), and BF16
// for bfloat16 matmuls.

constexpr int THREADS = LANES * WARPS;
constexpr int ROWS = 8;             // maximum number of candidates per thread block: the n of mma.m16n8k16
constexpr int TILE = 16;            // columns of keys and values that are stored, loaded and multiplied together
constexpr int HEAD = WIDTH / HEADS; // must be 32 in bfloat16, see why_not_fused
constexpr int MAX_SEGMENTS = 64;
constexpr int PADDED_VOCABULARY = (VOCABULARY + 127) / 128 * 128;
constexpr float LOWEST = -1e30f;
#define ALIGNED_BYTES(type) (int(sizeof(type) + 127) / 128 * 128)

#ifdef BF16
typedef unsigned short Scalar; // bfloat16 bits
#else
typedef float Scalar;
#endif

// Candidate buffers: `Candidates` of search/decoder.py, with capacity for more tokens and rewards.
struct Store {
    long long* tokens;           // [E, K, token_capacity]
    float* rewards;              // [E, K, reward_capacity]
    float* log_prob;             // [E, K]
    float* value;                // [E, K]
    unsigned char* ended;        // [E, K]
    long long* identity;         // [E, K]
    int token_capacity, reward_capacity;
    int num_tokens, num_rewards; // used so far
};

// Sampling parameters of one `Run` of search/decoder.py.
struct Part {
    const long long* seeds;     // [E] noise seeds; null: greedy
    const float* bin_values;    // [2, VOCABULARY - 1] bin values of the reward and of the value; null for other slots
    int number;                 // run number, hashed with the seed
    int num_slots;
    int allow_stop, top_k;
    float temperature, dropped; // dropped: 1 - nucleus; negative: no nucleus filter
    float middle;               // probability mass kept around the median; 1: keep all
    float percentile;           // of rewards and values; negative: mean
};

// Parameters of `extend`. Keys and values are stored in segments: segment 0 is the prompt, each later one holds at most
// one transition. A row of a segment consists of tiles: [HEADS][TILE][HEAD] keys or [HEADS][HEAD][TILE] values;
// bfloat16 uses the order of `key_offset` and `value_offset`.
struct Run {
    const float* token_embedding;
    const float* position_embedding;
    const long long* offsets;       // [positions] first embedding row of each position's slot
    const unsigned char* readable;  // [positions] whether later tokens may attend to this position
    const float* map_embedding;     // [E, WIDTH] added to every embedding; may be null
    const Scalar* weights;          // all layers, in the order of use
    const float* vectors;           // per layer: norm, biases, norm, biases; then the final norm
    const Scalar* heads;            // [slots], each padded to PADDED_VOCABULARY outputs
    const long long* given;         // [E, K, given_stride] unread tokens; the first num_given are used
    const int* order;               // [E, K] order in which candidates are assigned to thread blocks
    const int* ancestors;           // [E, K, MAX_SEGMENTS] row of every segment that a candidate continues
    const Scalar* prompt_keys;      // [LAYERS, rows, tiles, WIDTH * TILE]
    const Scalar* prompt_values;
    Scalar* keys;                   // [segments, LAYERS, rows, tiles, WIDTH * TILE]
    Scalar* values;
    float* logits;                  // [E, K, VOCABULARY] output; null: sample instead
    Store store;                    // receives the sampled tokens
    Part parts[2];                  // runs of slots, in order; the second may be empty
    long long stop_embedding;       // embedding row of the stop token
    long long prompt_stride;        // between layers, in elements
    long long layer_stride;         // between layers of a segment, in elements
    long long segment_stride;
    int segments[MAX_SEGMENTS];     // pool index of each complete segment, from entry 1 on
    int depth;                      // number of complete segments after the prompt
    int current;                    // pool index of the segment being written
    int prompt_tiles, prompt_columns;
    int tiles, capacity;            // of one row of a segment: tiles and columns
    int columns;                    // used columns of the current segment
    int candidates, group, groups;  // K, candidates per group, groups per environment
    int given_stride;
    int num_given, num_slots;       // unread tokens, slots to sample
    int first_slot;                 // slots of `parts` that earlier launches have sampled
    int start;                      // position of the first token to read
    int head_period, head_first;    // slots per transition; slot of the first sampled token
};

// Running state of a candidate during a launch.
struct CandidateState {
    unsigned long long noise[2]; // hash key of the noise, per part
    long long identity;
    float log_prob;
    int ended;
};

__device__ float warp_sum(float value) {
    for (int other = LANES / 2; other; other /= 2) value += shuffle_xor(value, other);
    return value;
}

// SplitMix64 of a key and a counter, as `_mix` in search/noise.py.
__device__ unsigned long long mix(unsigned long long key, unsigned long long number) {
    unsigned long long z = key + number * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Gumbel noise from 24 hash bits; bit for bit the uniform numbers of `Gumbel.slot` in search/noise.py.
__device__ float gumbel(unsigned long long key, unsigned long long index) {
    // The largest sum rounds to 2^24, whose noise would be infinite.
    const float uniform = fminf((float(mix(key, index + 1) >> 40) + 0.5f) * 0x1p-24f, 0x1.fffffep-1f);
    return -logf(-logf(uniform));
}

constexpr int TOKENS_PER_LANE = (VOCABULARY + LANES - 1) / LANES; // vocabulary entries held by each lane

__device__ float max_logit(const float (&lane_logits)[TOKENS_PER_LANE]) {
    float top = -INFINITY;
    for (int i = 0; i < TOKENS_PER_LANE; ++i) top = fmaxf(top, lane_logits[i]);
    return warp_max(top);
}

// Applies top-k and nucleus filters to a warp's scaled logits: removed tokens become -infinity. Selects the most likely
// tokens one at a time, because usually only a few are kept.
__device__ void filter(const Part& part, float (&lane_logits)[TOKENS_PER_LANE]) {
    const float top = max_logit(lane_logits);
    if (part.top_k == 1) {
        for (int i = 0; i < TOKENS_PER_LANE; ++i) lane_logits[i] = lane_logits[i] == top ? top : -INFINITY;
    } else if (part.top_k < VOCABULARY) {
        float lowest = INFINITY; // smallest logit kept so far
        for (int num_kept = 0; num_kept < part.top_k;) {
            float next = -INFINITY;
            int equal = 0;
            for (int i = 0; i < TOKENS_PER_LANE; ++i) next = lane_logits[i] < lowest ? fmaxf(next, lane_logits[i]) : next;
            lowest = warp_max(next);
            if (lowest == -INFINITY) break;
            for (int i = 0; i < TOKENS_PER_LANE; ++i) equal += lane_logits[i] == lowest;
            num_kept += warp_count(equal);
        }
        for (int i = 0; i < TOKENS_PER_LANE; ++i) lane_logits[i] = lane_logits[i] >= lowest ? lane_logits[i] : -INFINITY;
    }
    if (part.dropped < 0.0f) return;
    float total = 0.0f, prob[TOKENS_PER_LANE];
    for (int i = 0; i < TOKENS_PER_LANE; ++i) total += prob[i] = expf(lane_logits[i] - top);
    total = warp_sum(total);
    const float wanted = (1.0f - part.dropped) * total;
    float lowest = INFINITY, mass = 0.0f;
    while (mass < wanted) {
        float next = 0.0f;
        int equal = 0;
        for (int i = 0; i < TOKENS_PER_LANE; ++i) next = prob[i] < lowest ? fmaxf(next, prob[i]) : next;
        lowest = warp_max(next);
        if (lowest == 0.0f) break;
        for (int i = 0; i < TOKENS_PER_LANE; ++i) equal += prob[i] == lowest;
        mass += lowest * float(warp_count(equal));
    }
    for (int i = 0; i < TOKENS_PER_LANE; ++i) lane_logits[i] = prob[i] >= lowest ? lane_logits[i] : -INFINITY;
}

// As `keep_middle` in search/sampling.py: removes tokens that lie entirely in the lower or the upper tail.
__device__ void keep_middle(float mass, float (&lane_logits)[TOKENS_PER_LANE]) {
    const int lane = thread % LANES;
    const float top = max_logit(lane_logits);
    float prob[TOKENS_PER_LANE], before[TOKENS_PER_LANE], total = 0.0f;
    for (int i = 0; i < TOKENS_PER_LANE; ++i) {
        float all = prob[i] = expf(lane_logits[i] - top); // sum over a group of lanes that doubles with each step
        before[i] = total;
        for (int bit = 1; bit < LANES; bit *= 2) {
            const float theirs = shuffle_xor(all, bit);
            if (lane & bit) before[i] += theirs;
            all += theirs;
        }
        total += all;
    }
    const float first = 0.5f * (1.0f - mass) * total, last = 0.5f * (1.0f + mass) * total;
    for (int i = 0; i < TOKENS_PER_LANE; ++i)
        if (before[i] + prob[i] <= first || before[i] >= last) lane_logits[i] = -INFINITY;
}

// Mean or percentile of a discretized scalar, as `predicted_value` in search/sampling.py. The stop token counts as
// zero.
__device__ float predicted_value(const Part& part, const float* logits, const float* bin_values, float log_total, int lane) {
    float result = 0.0f;
    if (part.percentile < 0.0f) {
        for (int v = lane; v < VOCABULARY - 1; v += LANES) result += expf(logits[v] - log_total) * bin_values[v];
        return warp_sum(result);
    }
    // The smallest value whose cumulative probability reaches the percentile.
    float smallest = INFINITY, largest = -INFINITY;
    for (int v = lane; v < VOCABULARY; v += LANES) {
        const float own = v < VOCABULARY - 1 ? bin_values[v] : 0.0f;
        float mass = 0.0f;
        for (int other = 0; other < VOCABULARY; ++other) {
            const float value = other < VOCABULARY - 1 ? bin_values[other] : 0.0f;
            mass += value <= own ? expf(logits[other] - log_total) : 0.0f;
        }
        if (mass >= part.percentile) smallest = fminf(smallest, own);
        largest = fmaxf(largest, own);
    }
    smallest = -warp_max(-smallest);
    largest = warp_max(largest);
    return smallest < INFINITY ? smallest : largest;
}

// The part that a slot belongs to, and its index in that part.
struct Slot {
    int part, index;
    __device__ Slot(const Run& run, int slot) {
        const int slot_in_run = run.first_slot + slot;
        part = slot_in_run >= run.parts[0].num_slots;
        index = slot_in_run - (part ? run.parts[0].num_slots : 0);
    }
};

// Gumbel noise of one token of a candidate's slot.
__device__ float noise_of(const Run& run, const CandidateState& state, int candidate, int slot, int token) {
    const Slot location(run, slot);
    const long long first = ((long long)candidate * run.parts[location.part].num_slots + location.index) * VOCABULARY;
    return gumbel(state.noise[location.part], first + token);
}

// Samples the token of one slot with the Gumbel-max trick and updates the candidate. Run by one warp; returns the token
// to every lane. `noise(v)` is the Gumbel noise of token v; it is called only if the part has seeds.
template <typename Noise>
__device__ int sample_token(const Run& run, const float* logits, Noise noise, int env, int candidate, CandidateState& state, int slot, bool writes) {
    const int lane = thread % LANES;
    const Slot location(run, slot);
    const Part& part = run.parts[location.part];
    float lane_logits[TOKENS_PER_LANE], total = 0.0f;
    for (int i = 0; i < TOKENS_PER_LANE; ++i) lane_logits[i] = lane + i * LANES < VOCABULARY ? logits[lane + i * LANES] : -INFINITY;
    const float top = max_logit(lane_logits);
    for (int i = 0; i < TOKENS_PER_LANE; ++i) total += expf(lane_logits[i] - top);
    const float log_total = top + logf(warp_sum(total));

    const bool noisy = part.seeds != nullptr;
    for (int i = 0; i < TOKENS_PER_LANE; ++i) {
        if (lane + i * LANES == VOCABULARY - 1 && !part.allow_stop) lane_logits[i] = -INFINITY;
        if (noisy) lane_logits[i] /= part.temperature;
    }
    if (noisy) filter(part, lane_logits);
    if (noisy && part.middle < 1.0f) keep_middle(part.middle, lane_logits);
    float best = -INFINITY;
    int token = VOCABULARY;
    for (int i = 0; i < TOKENS_PER_LANE; ++i) {
        const int v = lane + i * LANES;
        if (lane_logits[i] == -INFINITY) continue;
        const float value = noisy ? lane_logits[i] + noise(v) : lane_logits[i];
        if (value > best) best = value, token = v;
    }
    const float highest = warp_max(best);
    token = warp_min(best == highest ? token : VOCABULARY);
    const float value = part.bin_values ? predicted_value(part, logits, part.bin_values + location.index * (VOCABULARY - 1), log_total, lane) : 0.0f;
    if (lane == 0) {
        const Store& store = run.store;
        const long long row = (long long)env * run.candidates + candidate;
        state.log_prob += logits[token] - log_total;
        if (!part.bin_values) {
            state.identity = (unsigned long long)state.identity * 6364136223846793005ull + (token + 1);
            state.ended |= token == VOCABULARY - 1;
        }
        if (writes) {
            store.tokens[row * store.token_capacity + store.num_tokens + slot] = token;
            const float earned = state.ended ? 0.0f : value;
            if (part.bin_values && location.index == 0) store.rewards[row * store.reward_capacity + store.num_rewards] = earned;
            if (part.bin_values && location.index == 1) store.value[row] = earned;
            if (slot + 1 == run.num_slots)
                store.log_prob[row] = state.log_prob, store.identity[row] = state.identity, store.ended[row] = state.ended;
        }
    }
    return token;
}

// Finishes a slot of one candidate: samples a token, or writes the logits if they were requested. Run by one warp.
template <typename Noise>
__device__ int finish_slot(const Run& run, const float* logits, Noise noise, int env, int candidate, CandidateState& state, int slot, bool writes) {
    if (!run.logits) return sample_token(run, logits, noise, env, candidate, state, slot, writes);
    float* output = run.logits + ((long long)env * run.candidates + candidate) * VOCABULARY;
    for (int v = thread % LANES; writes && v < VOCABULARY; v += LANES) output[v] = logits[v];
    return 0;
}

// Element i of the embedding of a token at a position. `offset` is the first embedding row of the position's slot.
__device__ float embedding_element(const Run& run, int env, int token, int position, long long offset, int i) {
    const long long index = token == VOCABULARY - 1 ? run.stop_embedding : token + offset;
    const float map_embedding = run.map_embedding ? run.map_embedding[(long long)env * WIDTH + i] : 0.0f;
    return run.token_embedding[index * WIDTH + i] + run.position_embedding[position * WIDTH + i] + map_embedding;
}

// The candidates of one environment that a thread block (or cluster) handles.
struct Group {
    int env, first, rows; // candidates first .. first + rows - 1 of the order; rows <= ROWS
    long long first_row;  // row of the environment's first candidate

    __device__ Group(const Run& run, int number) {
        env = number / run.groups;
        first = number % run.groups * run.group;
        rows = run.candidates - first < run.group ? run.candidates - first : run.group;
        first_row = (long long)env * run.candidates;
    }

    __device__ int candidate(const Run& run, int row) const { return row < rows ? run.order[first_row + first + row] : 0; }

    __device__ int given(const Run& run, int candidate, int step) const {
        return int(run.given[(first_row + candidate) * run.given_stride + step]);
    }

    __device__ CandidateState load_state(const Run& run, int candidate) const {
        const long long row = first_row + candidate;
        CandidateState state{{}, run.store.identity[row], run.store.log_prob[row], run.store.ended[row]};
        for (int i = 0; i < 2; ++i)
            if (run.parts[i].seeds) state.noise[i] = mix(mix(run.parts[i].seeds[env], 0), run.parts[i].number);
        return state;
    }
};
