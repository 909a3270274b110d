/*
 * The sampler's kernel: the rules of sampler.py, compiled. One call samples all rows of a step.
 *
 * sampler.py defines every rule, and both give the same tokens on every machine: all arithmetic is IEEE addition,
 * subtraction, multiplication, division and comparison, each rounded by itself (-ffp-contract=off, no -ffast-math), and
 * all sums have a defined order. Plain loops over neighbours are what compilers vectorise.
 *
 * Neither Python's nor numpy's headers are needed; native.py loads it with ctypes. It allocates nothing: the caller owns
 * all memory, scratch included.
 */
#define _POSIX_C_SOURCE 200809L
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* A checksum of this file, given by the compiler's command: native.py takes no library that was built from another. */
#ifndef VERSION
#define VERSION 0
#endif

/* Versions of one function for more than one processor; which one runs is decided when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(ONE_TARGET)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
/* Logits that are worth a further thread, which takes some 30 us to wake up (2 vCPU VM, 2026-11). */
#ifndef PER_THREAD
#define PER_THREAD 262144
#endif
#define EXPORT __attribute__((visibility("default")))
/* A version for a processor has to contain what it calls. */
#define INLINE static inline __attribute__((always_inline))

/* One slot's rules; `RULES` in sampler.py. */
struct rules {
    uint64_t stream; /* of random numbers */
    double top_p;     /* 1: off */
    double typical_p; /* 1: off */
    float scale;      /* log2(e) / temperature */
    float temperature;
    float min_p;    /* 0: off */
    float penalty;  /* 1: off */
    float presence; /* 0: off, as the next */
    float frequency;
    int32_t top_k;  /* 0: off; 1: greedy */
    int32_t penalises;  /* each token of the history is listed */
    int32_t num_listed; /* tokens in the slot's list */
    int32_t masked;     /* the slot's mask applies */
};

/* A token whose logit a slot's rules change; `LISTED` in sampler.py. */
struct listed {
    int32_t id;
    int32_t count; /* of it in the output; -1: not in the prompt either */
    float bias;
};

/* An array of numpy: the structure of its array interface protocol (PyArrayInterface). */
struct array {
    int two;
    int num_axes;
    char kind;
    int itemsize;
    int flags;
    intptr_t *shape;
    intptr_t *strides; /* in bytes */
    void *data;
};

/* One sampler, and the buffers of its calls; `_State` in native.py. */
struct sampler {
    int64_t vocab_size;
    int64_t num_slots;
    int64_t max_threads;
    struct rules *rules;   /* [num_slots] */
    struct listed *listed; /* [num_slots][vocab_size] */
    const uint32_t *masks; /* [num_slots][mask_size()]: a bit for each token, 1 if it may follow */
    int32_t *slots;        /* [num_slots]; of the rows of a call, as the next two */
    int32_t *positions;
    int32_t *tokens;
    float *scratch; /* [max_threads][scratch_size()] */
    void *(*pointer)(void *capsule, const char *name); /* Python's PyCapsule_GetPointer */
};

enum {
    LANES = 16,
    GROUP = 1024,   /* elements whose maxima are taken together */
    COLUMNS = 1024, /* of the table in which weights are summed; `_COLUMNS` in sampler.py */
    WORD = 32,      /* bits of a mask that stand together */
    LINE = 64,      /* neighbours that are processed at once */
    CACHE_LINE = 16, /* elements that memory gives at once */
    AHEAD = 2048,    /* elements from one that is read to one that is prefetched */
};

/* One thread's memory. */
struct scratch {
    float *edited; /* [vocab_size] */
    float *values;
    float *weights;
    float *keys;
    int32_t *ids;
    float *maxima;  /* [vocab_size / GROUP * LANES] */
    float *columns; /* [COLUMNS] */
};

/* Floats of one thread's memory; a multiple of 16. */
EXPORT int64_t scratch_size(int64_t vocab_size)
{
    int64_t padded = (vocab_size + LANES - 1) / LANES * LANES;
    return 5 * padded + vocab_size / GROUP * LANES + COLUMNS;
}

INLINE struct scratch scratch_of(const struct sampler *s, int64_t thread)
{
    int64_t padded = (s->vocab_size + LANES - 1) / LANES * LANES;
    float *start = s->scratch + thread * scratch_size(s->vocab_size);
    struct scratch found = {
        .edited = start,
        .values = start + padded,
        .weights = start + 2 * padded,
        .keys = start + 3 * padded,
        .ids = (int32_t *)(start + 4 * padded),
        .columns = start + 5 * padded,
        .maxima = start + 5 * padded + COLUMNS,
    };
    return found;
}

INLINE int64_t mask_size(const struct sampler *s) { return (s->vocab_size + WORD - 1) / WORD; }

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- Stage 1: edit ---- */

/* 1 if a mask allows a token; NULL: it allows all. */
INLINE int allows(const uint32_t *mask, int64_t i) { return !mask || (mask[i / WORD] >> i % WORD & 1); }

/* Apply the rules of the slot's list to a row. Returns `edited`. */
INLINE const float *edit(const float *row, int64_t size, const struct rules *rules, const struct listed *listed,
                         float *edited)
{
    for (int64_t start = 0; start < size; start += LINE) {
        int64_t count = size - start < LINE ? size - start : LINE;
        for (int j = 0; j < LINE; j += CACHE_LINE)
            __builtin_prefetch(row + start + AHEAD + j);
        memcpy(edited + start, row + start, (size_t)count * sizeof *row);
    }
    for (int32_t i = 0; i < rules->num_listed; i++) {
        int32_t count = listed[i].count;
        float value = edited[listed[i].id] + listed[i].bias;
        if (count >= 0)
            value = value > 0 ? value / rules->penalty : value * rules->penalty;
        if (count > 0)
            value = value - rules->frequency * (float)count - rules->presence;
        edited[listed[i].id] = value;
    }
    return edited;
}

/* Enter a generated token into the slot's list. */
static void enter(struct rules *rules, struct listed *listed, int32_t token)
{
    int32_t place = 0;
    while (place < rules->num_listed && listed[place].id != token)
        place++;
    if (place == rules->num_listed) {
        rules->num_listed++;
        listed[place] = (struct listed){.id = token};
    }
    listed[place].count = (listed[place].count > 0 ? listed[place].count : 0) + 1;
}

/* ---- Stage 2: draw ---- */

/*
 * The largest value of a row that the mask allows; NaN if one of these is. Of each whole group of elements `maxima` gets
 * LANES values: the maxima of those of its elements that are LANES apart.
 */
INLINE float survey(const float *row, int64_t size, const uint32_t *mask, float *maxima)
{
    float best = -HUGE_VALF, lanes[LANES];
    uint32_t odd = 0;
    int64_t whole = size / GROUP * GROUP;
    for (int j = 0; j < LANES; j++)
        lanes[j] = best;
    for (int64_t start = 0; start < whole; start += GROUP) {
        const float *group = row + start;
        float top[LINE];
        uint32_t nan[LINE / 2] = {0};
        for (int j = 0; j < LINE; j++)
            top[j] = -HUGE_VALF;
        for (int line = 0; line < GROUP; line += LINE) {
            const float *values = group + line;
            float allowed[LINE];
            /* Rows come from memory, where the processor's own prefetching is too slow: this halves the time. */
            for (int j = 0; j < LINE; j += CACHE_LINE)
                __builtin_prefetch(values + AHEAD + j);
            if (mask) {
                const uint32_t *words = mask + (start + line) / WORD;
                if (!(words[0] | words[1]))
                    continue;
                for (int j = 0; j < WORD; j++)
                    allowed[j] = words[0] >> j & 1 ? values[j] : -HUGE_VALF;
                for (int j = 0; j < WORD; j++)
                    allowed[WORD + j] = words[1] >> j & 1 ? values[WORD + j] : -HUGE_VALF;
                values = allowed;
            }
            for (int j = 0; j < LINE; j++)
                top[j] = top[j] > values[j] ? top[j] : values[j];
            for (int j = 0; j < LINE / 2; j++)
                nan[j] |= __builtin_isunordered(values[j], values[LINE / 2 + j]);
        }
        for (int j = 0; j < LINE / 2; j++)
            odd |= nan[j];
        for (int width = LINE / 2; width >= LANES; width /= 2)
            for (int j = 0; j < width; j++)
                top[j] = top[j] > top[j + width] ? top[j] : top[j + width];
        for (int j = 0; j < LANES; j++) {
            maxima[j] = top[j];
            lanes[j] = lanes[j] > top[j] ? lanes[j] : top[j];
        }
        maxima += LANES;
    }
    for (int j = 0; j < LANES; j++)
        best = best > lanes[j] ? best : lanes[j];
    for (int64_t i = whole; i < size; i++) {
        float value = allows(mask, i) ? row[i] : -HUGE_VALF;
        best = best > value ? best : value;
        odd |= value != value;
    }
    return odd ? NAN : best;
}

/* 1 if one of the values is at least `least`. */
INLINE int reaches(const float *values, int64_t count, float least)
{
    int any = 0;
    for (int64_t i = 0; i < count; i++)
        any |= values[i] >= least;
    return any;
}

/* The first place of the largest value that the mask allows. */
INLINE int64_t first(const float *row, int64_t size, const uint32_t *mask, float value, const float *maxima)
{
    int64_t start = 0, whole = size / GROUP * GROUP;
    for (; start < whole && !reaches(maxima, LANES, value); start += GROUP)
        maxima += LANES;
    while (row[start] != value || !allows(mask, start))
        start++;
    return start;
}

/* The number of values that are at least `least`. */
INLINE int64_t count_from(const float *values, int64_t count, float least)
{
    int64_t found = 0;
    for (int64_t start = 0; start < count; start += GROUP) {
        int64_t end = start + GROUP < count ? start + GROUP : count;
        int32_t some = 0;
        for (int64_t i = start; i < end; i++)
            some += values[i] >= least;
        found += some;
    }
    return found;
}

/* Floats in their order as integers, and back. */
INLINE int32_t ordered(uint32_t bits) { return (int32_t)(bits ^ ((bits >> 31) * 0x7fffffffu)); }
INLINE float unordered(int32_t place)
{
    uint32_t bits = (uint32_t)place;
    return float_of(bits ^ ((bits >> 31) * 0x7fffffffu));
}

/*
 * A value that at least `wanted` of the values reach, and at most `slack` more unless these equal the last one. `best`
 * is the largest. If fewer are finite: one that all finite values reach.
 */
INLINE float floor_of(const float *values, int64_t count, int64_t wanted, int64_t slack, float best)
{
    int64_t low = ordered(bits_of(-FLT_MAX)), high = ordered(bits_of(best));
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        float least = unordered((int32_t)middle);
        int64_t found = count_from(values, count, least);
        if (found < wanted) {
            high = middle - 1;
        } else {
            low = middle;
            if (found <= wanted + slack)
                break;
        }
    }
    return unordered((int32_t)low);
}

/*
 * Copy the values from `least` on that the mask allows, in their order, with their places. `maxima`: see `survey`.
 * Returns their number.
 */
INLINE int64_t collect(const float *row, int64_t size, const uint32_t *mask, float least, const float *maxima,
                       float *values, int32_t *ids)
{
    int64_t count = 0, whole = size / GROUP * GROUP;
    for (int64_t group = 0; group < size; group += GROUP, maxima += LANES) {
        if (group < whole && !reaches(maxima, LANES, least))
            continue;
        int64_t last = group < whole ? group + GROUP : size;
        for (int64_t start = group; start < last; start += LINE) {
            int64_t end = start + LINE < last ? start + LINE : last;
            if (!reaches(row + start, end - start, least))
                continue;
            for (int64_t i = start; i < end; i++) {
                if (row[i] >= least && allows(mask, i)) {
                    values[count] = row[i];
                    ids[count++] = (int32_t)i;
                }
            }
        }
    }
    return count;
}

/* Reduce a row to its `top_k` largest values, of those allowed, and ties with the last. Returns their number. */
INLINE int64_t select_top_k(const float *row, int64_t size, const uint32_t *mask, int64_t top_k, float best,
                            struct scratch *s)
{
    int64_t pool = size / GROUP * LANES;
    float least = -FLT_MAX;
    if (2 * top_k <= pool)
        least = floor_of(s->maxima, pool, top_k, top_k / 8, best);
    int64_t count = collect(row, size, mask, least, s->maxima, s->values, s->ids);
    if (count <= top_k)
        return count;
    least = floor_of(s->values, count, top_k, 0, best);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        s->values[kept] = s->values[i];
        s->ids[kept] = s->ids[i];
        kept += s->values[i] >= least;
    }
    return kept;
}

/* 2 to the power of a value of at most 0; below -124: 0. See `weigh` in sampler.py. */
INLINE float power(float exponent)
{
    const float rounding = 12582912.0f; /* 1.5 * 2**23: adding it rounds to an integer */
    float shifted = exponent + rounding;
    float rest = exponent - (shifted - rounding);
    float result = rest * 0.00132647273f + 0.00967151299f;
    result = result * rest + 0.0555073358f;
    result = result * rest + 0.240222424f;
    result = result * rest + 0.693147004f;
    result = result * rest + 1.0f;
    uint32_t bits = bits_of(result) + (bits_of(shifted) << 23);
    return exponent >= -124.0f ? float_of(bits) : 0.0f;
}

/* Fill `weights` with exp((value - best) / temperature), and `columns` with the sums of every COLUMNS-th of them. */
INLINE void weigh(const float *restrict values, int64_t count, float best, float scale, float *restrict weights,
                  float *restrict columns)
{
    memset(columns, 0, COLUMNS * sizeof *columns);
    for (int64_t start = 0; start < count; start += COLUMNS) {
        int64_t width = count - start < COLUMNS ? count - start : COLUMNS;
        for (int64_t j = 0; j < width; j++) {
            float weight = power((values[start + j] - best) * scale);
            weights[start + j] = weight;
            columns[j] += weight;
        }
    }
}

/* Set the weights of tokens that the mask excludes to 0, and fill `columns` anew. */
INLINE void drop_excluded(const uint32_t *mask, float *restrict weights, int64_t count, float *restrict columns)
{
    memset(columns, 0, COLUMNS * sizeof *columns);
    for (int64_t start = 0; start < count; start += WORD) {
        int64_t width = count - start < WORD ? count - start : WORD;
        for (int64_t j = 0; j < width; j++) {
            float weight = mask[start / WORD] >> j & 1 ? weights[start + j] : 0.0f;
            weights[start + j] = weight;
            columns[start % COLUMNS + j] += weight;
        }
    }
}

/* Set the weights whose key is not above `bound` to 0, and fill `columns` anew. The keys may be the weights. */
INLINE void drop(const float *keys, float bound, float *weights, int64_t count, float *restrict columns)
{
    memset(columns, 0, COLUMNS * sizeof *columns);
    for (int64_t start = 0; start < count; start += COLUMNS) {
        int64_t width = count - start < COLUMNS ? count - start : COLUMNS;
        for (int64_t j = 0; j < width; j++) {
            float weight = keys[start + j] > bound ? weights[start + j] : 0.0f;
            weights[start + j] = weight;
            columns[j] += weight;
        }
    }
}

/* Fill `columns` with the sums of the weights above `bound`. */
INLINE void sum_above(float bound, const float *restrict weights, int64_t count, float *restrict columns)
{
    memset(columns, 0, COLUMNS * sizeof *columns);
    for (int64_t start = 0; start < count; start += COLUMNS) {
        int64_t width = count - start < COLUMNS ? count - start : COLUMNS;
        for (int64_t j = 0; j < width; j++)
            columns[j] += weights[start + j] > bound ? weights[start + j] : 0.0f;
    }
}

/* The sum of all weights, from their columns. */
INLINE double sum(const float *columns, int64_t count)
{
    double total = 0;
    int64_t width = count < COLUMNS ? count : COLUMNS;
    for (int64_t j = 0; j < width; j++)
        total += columns[j];
    return total;
}

/* A bijection of 64 bits that spreads every input bit. Source: SplitMix64 (Steele, Lea, Flood 2014). */
INLINE uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* A random number in [0, 1) of 52 bits: a pure function of its arguments. */
INLINE double uniform(uint64_t stream, int32_t position, uint64_t draw)
{
    uint64_t counter = (uint64_t)position * UINT64_C(0x9E3779B97F4A7C15) + draw * UINT64_C(0xD1342543DE82EF95);
    return (double)(mix(stream + counter) >> 12) * 0x1p-52;
}

/* The place at `share` of the cumulated weights: first its column, then its line. */
INLINE int64_t locate(double share, double total, const float *weights, int64_t count, const float *columns)
{
    double target = share * total, before = 0, within = 0;
    int64_t column = 0, place;
    while (before + columns[column] <= target)
        before += columns[column++];
    target -= before;
    /* A column's float32 sum may exceed its weights: then the last one that adds something. */
    place = column;
    for (int64_t i = column; i < count; i += COLUMNS) {
        double sum = within + weights[i];
        if (sum > within)
            place = i;
        within = sum;
        if (within > target)
            break;
    }
    return place;
}

/* The largest value below the smallest weight in the nucleus. All larger weights together have less than `least_mass`. */
INLINE float below_nucleus(double least_mass, const float *weights, int64_t count, float *columns)
{
    uint32_t low = 0, high = bits_of(1.0f);
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        sum_above(float_of(middle), weights, count, columns);
        if (sum(columns, count) < least_mass)
            high = middle;
        else
            low = middle + 1;
    }
    return low ? float_of(low - 1) : -1.0f;
}

/* Fill `keys` with the negative distance of each token's log2 p from the mean. `surprise` in sampler.py explains it. */
INLINE void rank_typical(const float *restrict values, int64_t count, float best, float scale,
                         const float *restrict weights, double total, float *restrict keys, float *restrict columns)
{
    memset(columns, 0, COLUMNS * sizeof *columns);
    for (int64_t start = 0; start < count; start += COLUMNS) {
        int64_t width = count - start < COLUMNS ? count - start : COLUMNS;
        for (int64_t j = 0; j < width; j++) {
            keys[start + j] = (values[start + j] - best) * scale;
            columns[j] += weights[start + j] > 0 ? keys[start + j] * weights[start + j] : 0.0f;
        }
    }
    float mean = (float)(sum(columns, count) / total);
    for (int64_t i = 0; i < count; i++)
        keys[i] = -fabsf(keys[i] - mean);
}

/*
 * Draw a place of the weights, whose sum is `left`: of those with the largest keys that together have a share `p` of
 * `total`. sampler.py explains how.
 */
INLINE int64_t draw_among(const float *keys, double p, double total, double left, const struct rules *rules,
                          int32_t position, int64_t count, struct scratch *s)
{
    for (uint64_t turn = 0;; turn++) {
        double share = uniform(rules->stream, position, turn);
        int64_t place = locate(share, left, s->weights, count, s->columns);
        if (p >= 1)
            return place;
        drop(keys, keys[place], s->weights, count, s->columns);
        left = sum(s->columns, count);
        if (left < p * total)
            return place;
    }
}

/* Draw a place of the values that the mask allows, the largest of which is `best`. */
INLINE int64_t draw(const struct rules *rules, const float *values, const uint32_t *mask, float best, int32_t position,
                    int64_t count, struct scratch *s)
{
    weigh(values, count, best, rules->scale, s->weights, s->columns);
    if (mask)
        drop_excluded(mask, s->weights, count, s->columns);
    double total = sum(s->columns, count), left = total;
    if (rules->min_p > 0) {
        drop(s->weights, float_of(bits_of(rules->min_p) - 1), s->weights, count, s->columns);
        left = sum(s->columns, count);
    }
    if (rules->typical_p >= 1)
        return draw_among(s->weights, rules->top_p, total, left, rules, position, count, s);
    if (rules->top_p < 1) {
        float bound = below_nucleus(rules->top_p * total, s->weights, count, s->columns);
        drop(s->weights, bound, s->weights, count, s->columns);
        left = sum(s->columns, count);
    }
    rank_typical(values, count, best, rules->scale, s->weights, left, s->keys, s->columns);
    sum_above(0.0f, s->weights, count, s->columns);
    return draw_among(s->keys, rules->typical_p, left, left, rules, position, count, s);
}

enum { NO_TOKEN = -1, NONE_ALLOWED = -2 };

/* The token of one row; NO_TOKEN if it has no distribution, NONE_ALLOWED if its mask leaves nothing of it. */
FOR_EACH_PROCESSOR static int32_t token_of(const struct rules *rules, const float *row, const struct listed *listed,
                                           const uint32_t *mask, int32_t position, int64_t size, struct scratch *s)
{
    if (rules->num_listed)
        row = edit(row, size, rules, listed, s->edited);
    float best = mask ? survey(row, size, mask, s->maxima) : survey(row, size, NULL, s->maxima);
    if (!(best >= -FLT_MAX && best <= FLT_MAX))
        return mask && best == -HUGE_VALF ? NONE_ALLOWED : NO_TOKEN;
    if (rules->top_k == 1)
        return (int32_t)first(row, size, mask, best, s->maxima);
    if (rules->top_k == 0 || rules->top_k >= size)
        return (int32_t)draw(rules, row, mask, best, position, size, s);
    int64_t count = select_top_k(row, size, mask, rules->top_k, best, s);
    return s->ids[draw(rules, s->values, NULL, best, position, count, s)];
}

/* ---- Rows and threads ---- */

struct call {
    const struct sampler *sampler;
    const char *logits;
    int64_t stride;
    int64_t count;
    int32_t note;
    atomic_llong next;
};

/* Sample rows of a call until none is left. */
static void take_rows(struct call *call, int64_t thread)
{
    const struct sampler *s = call->sampler;
    struct scratch scratch = scratch_of(s, thread);
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&call->next, 1, memory_order_relaxed);
        if (i >= call->count)
            return;
        struct rules *rules = s->rules + s->slots[i];
        struct listed *listed = s->listed + s->slots[i] * s->vocab_size;
        const uint32_t *mask = call->note && rules->masked ? s->masks + s->slots[i] * mask_size(s) : NULL;
        const float *row = (const float *)(call->logits + i * call->stride);
        int32_t token = token_of(rules, row, listed, mask, s->positions[i], s->vocab_size, &scratch);
        s->tokens[i] = token;
        if (call->note && token >= 0 && rules->penalises)
            enter(rules, listed, token);
    }
}

/*
 * Threads that wait for a call. One that wakes up after the last row was taken goes back to sleep, and nobody waits for
 * it. They end with the process; a process that is forked starts with none.
 */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t wanted, done;
    struct call *call; /* NULL: no thread is wanted */
    int64_t wants;     /* further threads that this call takes */
    int64_t given;     /* threads that have taken part, the caller included */
    int64_t busy;
    int64_t num_threads;
    int prepared;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wanted = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void *wait_for_calls(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.call || !pool.wants)
            pthread_cond_wait(&pool.wanted, &pool.lock);
        struct call *call = pool.call;
        int64_t thread = pool.given++;
        pool.wants--;
        pool.busy++;
        pthread_mutex_unlock(&pool.lock);
        take_rows(call, thread);
        pthread_mutex_lock(&pool.lock);
        if (--pool.busy == 0)
            pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void before_fork(void) { pthread_mutex_lock(&pool.lock); }
static void in_parent(void) { pthread_mutex_unlock(&pool.lock); }
static void in_child(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wanted, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.call = NULL;
    pool.busy = pool.num_threads = 0;
}

/* Start threads until there are `count`, with the lock held. Fewer are no error. Signals are for the other threads. */
static void start_threads(int64_t count)
{
    sigset_t all, before;
    if (!pool.prepared)
        pool.prepared = pthread_atfork(before_fork, in_parent, in_child) == 0;
    if (!pool.prepared)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_threads < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_for_calls, NULL))
            break;
        pthread_detach(thread);
        pool.num_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void share_rows(struct call *call, int64_t threads)
{
    pthread_mutex_lock(&pool.lock);
    int free = !pool.call;
    if (free) {
        if (pool.num_threads < threads - 1)
            start_threads(threads - 1);
        pool.call = call;
        pool.wants = threads - 1;
        pool.given = 1;
        if (threads == 2)
            pthread_cond_signal(&pool.wanted);
        else
            pthread_cond_broadcast(&pool.wanted);
    }
    pthread_mutex_unlock(&pool.lock);
    take_rows(call, 0);
    if (free) {
        pthread_mutex_lock(&pool.lock);
        pool.wants = 0;
        while (pool.busy)
            pthread_cond_wait(&pool.done, &pool.lock);
        pool.call = NULL;
        pthread_mutex_unlock(&pool.lock);
    }
}

EXPORT uint32_t version(void) { return VERSION; }

/* 1 if the elements of an array are of a kind, aligned and in the machine's order of bytes. */
static int holds(const struct array *array, char kind)
{
    return array->kind == kind && array->itemsize == 4 && (array->flags & 0x300) == 0x300;
}

static int32_t element(const struct array *array, int64_t i)
{
    return *(const int32_t *)((const char *)array->data + i * array->strides[0]);
}

enum { WRONG_TYPE = -1, WRONG_SHAPE = -2, WRONG_SLOT = -3 };

/*
 * Sample the rows of `logits`, float32[B, vocab_size] with contiguous rows, into `tokens`. All arrays are capsules, as
 * numpy's `__array_struct__`. `note`: enter the tokens into the histories. Returns B, or before anything is written:
 * WRONG_TYPE, also for rows that are not contiguous, WRONG_SHAPE, or WRONG_SLOT less the row with a slot that does not
 * exist.
 */
EXPORT int64_t sample(const struct sampler *s, void *logits, void *slots, void *positions, int32_t note)
{
    const struct array *rows = s->pointer(logits, NULL), *of = s->pointer(slots, NULL);
    const struct array *at = s->pointer(positions, NULL);
    if (rows->num_axes != 2 || of->num_axes != 1 || at->num_axes != 1)
        return WRONG_SHAPE;
    int64_t count = rows->shape[0];
    if (rows->shape[1] != s->vocab_size || of->shape[0] != count || at->shape[0] != count || count > s->num_slots)
        return WRONG_SHAPE;
    if (!holds(rows, 'f') || !holds(of, 'i') || !holds(at, 'i') || rows->strides[1] != sizeof(float))
        return WRONG_TYPE;
    for (int64_t i = 0; i < count; i++) {
        s->slots[i] = element(of, i);
        s->positions[i] = element(at, i);
        if (s->slots[i] < 0 || s->slots[i] >= s->num_slots)
            return WRONG_SLOT - i;
    }
    struct call call = {
        .sampler = s, .logits = rows->data, .stride = rows->strides[0], .count = count, .note = note};
    int64_t threads = count * s->vocab_size / PER_THREAD;
    threads = threads < count ? threads : count;
    threads = threads < s->max_threads ? threads : s->max_threads;
    atomic_init(&call.next, 0);
    if (threads > 1)
        share_rows(&call, threads);
    else
        take_rows(&call, 0);
    return count;
}
