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

// What is known of the candidates so far: as `Candidates` in stepwise.py, with room for more tokens and rewards.
struct Store {
    long long* tokens;       // [E, K, token_room]
    float* rewards;          // [E, K, reward_room]
    float* log_prob;         // [E, K]
    float* value;            // [E, K]
    unsigned char* ended;    // [E, K]
    long long* identity;     // [E, K]
    int token_room, reward_room;
    int num_tokens, num_rewards; // so far
};

// How the slots of one `Run` of stepwise.py are drawn.
struct Part {
    const long long* seeds; // [E] of the noise; null takes the most likely tokens
    const float* worths;    // [2, VOCABULARY - 1], what the tokens of a reward and then of a value are worth, or null
    int number;             // of the run, which with the seed makes the noise
    int num_slots;
    int allow_stop, top_k;
    float temperature, dropped;      // dropped: 1 - nucleus, negative to keep all
    float middle;                    // share of the mass around the median, 1 to keep all
    float percentile;                // of rewards and values; negative for the mean
};

// Slots for every candidate. Keys and values live in segments: the prompt (0), then blocks of at most one
// transition's columns. Within a segment a row holds its tiles, each [HEADS][TILE][HEAD] keys or [HEADS][HEAD][TILE]
// values (bfloat16 has an order of its own), so that later tokens read whole tiles.
struct Run {
    const float* token_embedding;
    const float* position_embedding;
    const long long* offsets;       // [positions], where the embeddings of a position's slot begin
    const unsigned char* readable;  // [positions], whether later tokens may attend to it
    const float* map_embedding;     // [E, WIDTH] added to every embedding, or null
    const Number* weights;          // of all layers, in the order they are read
    const float* vectors;           // per layer: norm, biases, norm, biases; then the last norm
    const Number* heads;            // [slots], each as wide as VOCABULARY_ROOM
    const long long* given;         // [E, K, given_room], the first G of them are tokens not read yet
    const int* order;               // [E, K], in which candidates are dealt out to blocks
    const int* ancestors;           // [E, K, MAX_SEGMENTS], rows of every segment that a candidate continues
    const Number* prompt_keys;      // [LAYERS, rows, tiles, WIDTH * TILE]
    const Number* prompt_values;
    Number* keys;                   // [segments, LAYERS, rows, tiles, WIDTH * TILE]
    Number* values;
    float* logits;                  // [E, K, VOCABULARY] instead of drawing, or null
    Store store;                    // where what is drawn is added
    Part parts[2];                  // one after the other; the second may have no slots
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
    int candidates, group, groups;  // K, rows of one block, blocks of one environment
    int given_room;
    int num_given, num_slots;       // G, S
    int first_slot;                 // slots of the parts that were drawn by launches before this one
    int start;                      // position of the first token to read
    int head_period, head_first;    // slots of a transition; slot predicted first
};

// What a candidate's tokens add up to, while a block works on it.
struct Tally {
    unsigned long long noise[2]; // the key of each part's
    long long identity;
    float log_prob;
    int ended;
};

__device__ float warp_sum(float value) {
    for (int other = LANES / 2; other; other /= 2) value += from_lane(value, other);
    return value;
}

// As `_mix` in sampling.py, of a key and a number.
__device__ unsigned long long mix(unsigned long long key, unsigned long long number) {
    unsigned long long z = key + number * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// The same numbers as `Gumbel.slot` in sampling.py: 24 bits of a hash of key and index.
__device__ float gumbel(unsigned long long key, unsigned long long index) {
    // The largest sum rounds to 2^24, whose noise would be infinite.
    const float uniform = fminf((float(mix(key, index + 1) >> 40) + 0.5f) * 0x1p-24f, 0x1.fffffep-1f);
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
__device__ void filter(const Part& part, float (&own)[SHARE]) {
    const float top = highest_of(own);
    if (part.top_k == 1) {
        for (int i = 0; i < SHARE; ++i) own[i] = own[i] == top ? top : -INFINITY;
    } else if (part.top_k < VOCABULARY) {
        float lowest = INFINITY; // of those kept so far
        for (int num_kept = 0; num_kept < part.top_k;) {
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
    if (part.dropped < 0.0f) return;
    float total = 0.0f, prob[SHARE];
    for (int i = 0; i < SHARE; ++i) total += prob[i] = expf(own[i] - top);
    total = warp_sum(total);
    const float wanted = (1.0f - part.dropped) * total;
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

// As `keep_middle` in sampling.py: drops what lies wholly in the first or the last tokens of the mass.
__device__ void keep_middle(float mass, float (&own)[SHARE]) {
    const int lane = thread % LANES;
    const float top = highest_of(own);
    float prob[SHARE], before[SHARE], total = 0.0f;
    for (int i = 0; i < SHARE; ++i) {
        float all = prob[i] = expf(own[i] - top); // of the lanes whose numbers differ in the bits seen so far
        before[i] = total;
        for (int bit = 1; bit < LANES; bit *= 2) {
            const float theirs = from_lane(all, bit);
            if (lane & bit) before[i] += theirs;
            all += theirs;
        }
        total += all;
    }
    const float first = 0.5f * (1.0f - mass) * total, last = 0.5f * (1.0f + mass) * total;
    for (int i = 0; i < SHARE; ++i)
        if (before[i] + prob[i] <= first || before[i] >= last) own[i] = -INFINITY;
}

// The mean or a percentile of a discretized scalar, as `predicted_value` in sampling.py; the stop token counts as zero.
__device__ float predicted_value(const Part& part, const float* logits, const float* worths, float log_total, int lane) {
    float result = 0.0f;
    if (part.percentile < 0.0f) {
        for (int v = lane; v < VOCABULARY - 1; v += LANES) result += expf(logits[v] - log_total) * worths[v];
        return warp_sum(result);
    }
    // The smallest value with at least this share of the mass at or below it.
    float smallest = INFINITY, largest = -INFINITY;
    for (int v = lane; v < VOCABULARY; v += LANES) {
        const float own = v < VOCABULARY - 1 ? worths[v] : 0.0f;
        float mass = 0.0f;
        for (int other = 0; other < VOCABULARY; ++other) {
            const float worth = other < VOCABULARY - 1 ? worths[other] : 0.0f;
            mass += worth <= own ? expf(logits[other] - log_total) : 0.0f;
        }
        if (mass >= part.percentile) smallest = fminf(smallest, own);
        largest = fmaxf(largest, own);
    }
    smallest = -warp_max(-smallest);
    largest = warp_max(largest);
    return smallest < INFINITY ? smallest : largest;
}

// Which part a slot belongs to, and where in it.
struct Slot {
    int part, index;
    __device__ Slot(const Run& run, int slot) {
        const int among_all = run.first_slot + slot;
        part = among_all >= run.parts[0].num_slots;
        index = among_all - (part ? run.parts[0].num_slots : 0);
    }
};

// The noise of one token that a candidate may draw in a slot.
__device__ float noise_of(const Run& run, const Tally& tally, int candidate, int slot, int token) {
    const Slot place(run, slot);
    const long long first = ((long long)candidate * run.parts[place.part].num_slots + place.index) * VOCABULARY;
    return gumbel(tally.noise[place.part], first + token);
}

// Draws the token of one candidate in one slot by the Gumbel-max trick; one warp. Returns it to every lane. `noise` has
// that of the tokens, where there is any.
template <typename Noise>
__device__ int draw(const Run& run, const float* logits, Noise noise, int env, int candidate, Tally& tally, int slot, bool writes) {
    const int lane = thread % LANES;
    const Slot place(run, slot);
    const Part& part = run.parts[place.part];
    float own[SHARE], total = 0.0f;
    for (int i = 0; i < SHARE; ++i) own[i] = lane + i * LANES < VOCABULARY ? logits[lane + i * LANES] : -INFINITY;
    const float top = highest_of(own);
    for (int i = 0; i < SHARE; ++i) total += expf(own[i] - top);
    const float log_total = top + logf(warp_sum(total));

    const bool noisy = part.seeds != nullptr;
    for (int i = 0; i < SHARE; ++i) {
        if (lane + i * LANES == VOCABULARY - 1 && !part.allow_stop) own[i] = -INFINITY;
        if (noisy) own[i] /= part.temperature;
    }
    if (noisy) filter(part, own);
    if (noisy && part.middle < 1.0f) keep_middle(part.middle, own);
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
    const float worth = part.worths ? predicted_value(part, logits, part.worths + place.index * (VOCABULARY - 1), log_total, lane) : 0.0f;
    if (lane == 0) {
        const Store& store = run.store;
        const long long row = (long long)env * run.candidates + candidate;
        tally.log_prob += logits[token] - log_total;
        if (!part.worths) {
            tally.identity = (unsigned long long)tally.identity * 6364136223846793005ull + (token + 1);
            tally.ended |= token == VOCABULARY - 1;
        }
        if (writes) {
            store.tokens[row * store.token_room + store.num_tokens + slot] = token;
            const float earned = tally.ended ? 0.0f : worth;
            if (part.worths && place.index == 0) store.rewards[row * store.reward_room + store.num_rewards] = earned;
            if (part.worths && place.index == 1) store.value[row] = earned;
            if (slot + 1 == run.num_slots)
                store.log_prob[row] = tally.log_prob, store.identity[row] = tally.identity, store.ended[row] = tally.ended;
        }
    }
    return token;
}

// Ends a slot of one candidate: draws a token, or hands out the logits where these were asked for. One warp.
template <typename Noise>
__device__ int conclude(const Run& run, const float* logits, Noise noise, int env, int candidate, Tally& tally, int slot, bool writes) {
    if (!run.logits) return draw(run, logits, noise, env, candidate, tally, slot, writes);
    float* place = run.logits + ((long long)env * run.candidates + candidate) * VOCABULARY;
    for (int v = thread % LANES; writes && v < VOCABULARY; v += LANES) place[v] = logits[v];
    return 0;
}

// One number of what a token at a position is embedded as; the position's slot has its embeddings from `offset` on.
__device__ float embedded(const Run& run, int env, int token, int position, long long offset, int i) {
    const long long index = token == VOCABULARY - 1 ? run.stop_embedding : token + offset;
    const float map_embedding = run.map_embedding ? run.map_embedding[(long long)env * WIDTH + i] : 0.0f;
    return run.token_embedding[index * WIDTH + i] + run.position_embedding[position * WIDTH + i] + map_embedding;
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
        return int(run.given[(first_row + candidate) * run.given_room + step]);
    }

    __device__ Tally tally(const Run& run, int candidate) const {
        const long long place = first_row + candidate;
        Tally tally{{}, run.store.identity[place], run.store.log_prob[place], run.store.ended[place]};
        for (int i = 0; i < 2; ++i)
            if (run.parts[i].seeds) tally.noise[i] = mix(mix(run.parts[i].seeds[env], 0), run.parts[i].number);
        return tally;
    }
};
