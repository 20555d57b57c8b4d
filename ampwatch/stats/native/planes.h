/* The count of a block in vectors, its histogram without a table.
 *
 * The largest magnitude is found first. Then each element is turned into a word with one bit, at the place of its
 * exponent among the PLACES up to the largest; what is smaller, and a zero, has no bit. To count the elements of each
 * exponent is then to count, place by place, the bits of many words, and a carry-save adder does that for three words
 * at a time (Harley and Seal's population count): plane[k] holds digit k of the count of each place, in each lane.
 * Where that leaves elements over, the zeros are counted, and the block is looked at again for the PLACES below.
 *
 * 16-bit elements are widened as they are loaded. `format` is a constant wherever this is called, so each has code of
 * its own, without the count of the grid that its elements are always on.
 *
 * Needs the primitives of avx512.h, avx2.h or sse2.h. */

enum {
    NAME(STRIDE) = 16 * LANES, /* elements of one turn of the loop */
    NAME(PLANES) = LANES == 16 ? 9 : LANES == 8 ? 10 : 11, /* digits of BLOCK / LANES */
    NAME(SUMS) = LANES == 4 ? 8 : 4, /* of squares: each lane adds at most 128 */
};

/* Where other ways to count begin: with infinity, or 2^16, of which a bfloat16 is beyond all float16. */
#define LIMIT(format) ((format) == BFLOAT16 ? 0x47800000 : INFINITE)

/* Elements in whole strides, and a rest that is filled up with zeros, which are in no bin and on every grid. */
struct NAME(span) {
    const char *x;
    size_t n, whole;
    char rest[NAME(STRIDE) * sizeof(float)];
};

INLINE size_t NAME(bytes)(size_t n, enum format format) { return n * (format == FLOAT32 ? 4 : 2); }

struct NAME(view) {
    NAME(bits) plane[NAME(PLANES)];
    NAME(bits) largest, n_float16, n_bfloat16; /* the last two in the lower half of each lane */
    NAME(reals) sum[NAME(SUMS)];      /* of squares */
};

INLINE NAME(bits) NAME(add)(NAME(bits) *plane, NAME(bits) a, NAME(bits) b)
{
    NAME(bits) carry = NAME(majority)(*plane, a, b);
    *plane = NAME(parity)(*plane, a, b);
    return carry;
}

/* The words of LANES elements; and, unless that was done before, whatever else is asked of them. */
INLINE NAME(bits) NAME(look)(struct NAME(view) *view, const char *x, enum format format, int i, float factor,
                             NAME(window) window, int again)
{
    x += NAME(bytes)((size_t)i * LANES, format);
    NAME(bits) bits = NAME(load)(x, format), size = NAME(magnitude)(bits);
    if (!again) {
        /* While this block is looked at and unscaled, the next is under way, line by line. */
        if (NAME(bytes)((size_t)i * LANES, format) % 64 == 0)
            __builtin_prefetch((const void *)((uintptr_t)x + NAME(bytes)(BLOCK, format)));
        view->largest = NAME(larger)(view->largest, size);
        if (format == FLOAT32)
            view->n_float16 = NAME(more_float16)(view->n_float16, size);
#ifdef READS_16_BITS
        if (format == BFLOAT16)
            view->n_float16 = NAME(more_float16_of_bfloat16)(view->n_float16, size);
#endif
        if (format != BFLOAT16)
            view->n_bfloat16 = NAME(more_bfloat16)(view->n_bfloat16, bits);
        view->sum[i % NAME(SUMS)] = NAME(add_square)(view->sum[i % NAME(SUMS)], bits, factor);
    }
    return NAME(one_hot)(size, window);
}

#define LOOK(i) NAME(look)(view, x, format, i, factor, window, again)
#define LOOK2(i) NAME(add)(view->plane, LOOK(i), LOOK((i) + 1))
#define LOOK4(i) NAME(add)(view->plane + 1, LOOK2(i), LOOK2((i) + 2))
#define LOOK8(i) NAME(add)(view->plane + 2, LOOK4(i), LOOK4((i) + 4))

INLINE void NAME(look16)(struct NAME(view) *view, const char *x, enum format format, float factor,
                         NAME(window) window, int again)
{
    NAME(bits) carry = NAME(add)(view->plane + 3, LOOK8(0), LOOK8(8));
    for (int k = 4; k < NAME(PLANES); k++)
        carry = NAME(add)(view->plane + k, carry, NAME(all)(0));
}

#undef LOOK
#undef LOOK2
#undef LOOK4
#undef LOOK8

INLINE void NAME(cut)(struct NAME(span) *span, const void *x, enum format format, size_t n)
{
    size_t rest = n % NAME(STRIDE), bytes = NAME(bytes)(rest, format);
    span->x = x;
    span->n = n;
    span->whole = n - rest;
    if (rest) {
        memset(span->rest + bytes, 0, sizeof span->rest - bytes);
        memcpy(span->rest, span->x + NAME(bytes)(span->whole, format), bytes);
    }
}

/* Its elements with the zeros. */
INLINE size_t NAME(filled)(const struct NAME(span) *span)
{
    return span->whole + (span->n > span->whole ? NAME(STRIDE) : 0);
}

INLINE struct NAME(view) NAME(look_at)(const struct NAME(span) *span, enum format format, float factor, int first,
                                       int again)
{
    struct NAME(view) view;
    memset(&view, 0, sizeof view);
    NAME(window) window = NAME(window_from)(first);
    for (size_t i = 0; i < span->whole; i += NAME(STRIDE))
        NAME(look16)(&view, span->x + NAME(bytes)(i, format), format, factor, window, again);
    if (span->n > span->whole)
        NAME(look16)(&view, span->rest, format, factor, window, again);
    return view;
}

INLINE uint32_t NAME(largest)(NAME(bits) x)
{
    uint32_t lane[LANES], largest = 0;
    memcpy(lane, &x, sizeof lane);
    for (int k = 0; k < LANES; k++)
        largest = lane[k] > largest ? lane[k] : largest;
    return largest;
}

/* The exponent of the largest magnitude. */
INLINE int NAME(last_of)(const struct NAME(span) *span, enum format format)
{
    NAME(bits) found = NAME(all)(0), other = found;
    for (size_t i = 0; i < span->whole; i += 2 * LANES) {
        found = NAME(larger)(found, NAME(magnitude)(NAME(load)(span->x + NAME(bytes)(i, format), format)));
        other = NAME(larger)(other, NAME(magnitude)(NAME(load)(span->x + NAME(bytes)(i + LANES, format), format)));
    }
    for (size_t i = 0; i < span->n - span->whole; i += LANES)
        found = NAME(larger)(found, NAME(magnitude)(NAME(load)(span->rest + NAME(bytes)(i, format), format)));
    return (int)(NAME(largest)(NAME(larger)(found, other)) >> MANTISSA);
}

/* The sum of the lower halves of the lanes. */
INLINE uint32_t NAME(total)(NAME(bits) x)
{
    uint32_t lane[LANES], sum = 0;
    memcpy(lane, &x, sizeof lane);
    for (int k = 0; k < LANES; k++)
        sum += lane[k] & 0xffff;
    return sum;
}

INLINE double NAME(sum_of)(const NAME(reals) *sum)
{
    double total = 0;
    for (int i = 0; i < NAME(SUMS); i++) {
        float lane[LANES];
        memcpy(lane, sum + i, sizeof lane);
        for (int k = 0; k < LANES; k++)
            total += (double)lane[k];
    }
    return total;
}

/* The places that any element is in. */
INLINE uint32_t NAME(taken)(const struct NAME(view) *view)
{
    NAME(bits) any = view->plane[0];
    for (int k = 1; k < NAME(PLANES); k++)
        any = NAME(either)(any, view->plane[k]);
    uint32_t lane[LANES], taken = 0;
    memcpy(lane, &any, sizeof lane);
    for (int k = 0; k < LANES; k++)
        taken |= lane[k];
    return taken & (uint32_t)(((uint64_t)1 << PLACES) - 1);
}

/* Adds the counts of the exponents from `first`, which is at place 0. Answers how many elements that are. */
INLINE uint32_t NAME(add_planes)(const struct NAME(view) *view, size_t n, int first, struct tally *tally)
{
    size_t most = (n + LANES - 1) / LANES; /* in a lane */
    uint32_t found = 0;
    for (uint32_t taken = NAME(taken)(view); taken; taken &= taken - 1) {
        int place = __builtin_ctz(taken);
        uint32_t count = 0;
        for (int k = 0; most >> k; k++)
            count += NAME(ones_at)(view->plane[k], place) << k;
        tally->hist[bin_of(first + place - BIAS)] += count;
        found += count;
    }
    return found;
}

INLINE uint32_t NAME(zeros_of)(const struct NAME(span) *span, enum format format)
{
    uint32_t zeros = 0;
    if (format == FLOAT32) {
        const float *x = (const void *)span->x;
#pragma omp simd reduction(+ : zeros)
        for (size_t i = 0; i < span->n; i++)
            zeros += (bits_of(x[i]) & MAGNITUDE) == 0;
    } else {
        const uint16_t *x = (const void *)span->x;
#pragma omp simd reduction(+ : zeros)
        for (size_t i = 0; i < span->n; i++)
            zeros += (x[i] & 0x7fff) == 0;
    }
    return zeros;
}

/* What is below the exponent `last` and no zero: `left` elements and the zeros. */
INLINE void NAME(add_lower)(const struct NAME(span) *span, enum format format, int last, uint32_t left,
                            struct tally *tally)
{
    left -= NAME(zeros_of)(span, format);
    for (; left && last > BIAS + HIST_LOG2_MIN; last -= PLACES) {
        int first = last - PLACES + 1;
        struct NAME(view) view = NAME(look_at)(span, format, 0, first, 1);
        left -= NAME(add_planes)(&view, span->n, first, tally);
    }
    tally->hist[0] += left;
}

/* Counts what is there; or answers 0, having counted nothing, if an element is LIMIT of its format or more. */
INLINE int NAME(count_finite)(const struct NAME(span) *span, enum format format, struct tally *tally)
{
    /* Where the places end is told by the block before, with room for larger ones, or found out. */
    int last = tally->last ? tally->last + 1 : NAME(last_of)(span, format), first;
    float factor;
    uint32_t largest;
    struct NAME(view) view;
    for (;; last = (int)(largest >> MANTISSA)) {
        last = last < PLACES ? PLACES : last;
        first = last - PLACES + 1;
        /* Squares are added in float32, of values multiplied by a power of two so that none is lost that counts. */
        factor = float_of((uint32_t)(2 * BIAS - last < 1 ? 1 : 2 * BIAS - last) << MANTISSA);
        view = NAME(look_at)(span, format, factor, first, 0);
        largest = NAME(largest)(view.largest);
        int found = (int)(largest >> MANTISSA);
        if (!largest || largest >= LIMIT(format))
            return !largest;
        if (found <= last && (found >= first || last == PLACES))
            break;
    }
    uint32_t left = (uint32_t)span->n - NAME(add_planes)(&view, span->n, first, tally);
    if (left)
        NAME(add_lower)(span, format, first - 1, left, tally);
    uint32_t filled = (uint32_t)NAME(filled)(span);
    if (format != FLOAT16)
        tally->n_offgrid += filled - NAME(total)(view.n_float16);
    if (format != BFLOAT16)
        tally->n_offgrid_bf16 += filled - NAME(total)(view.n_bfloat16);
    tally->sum_sq += NAME(sum_of)(view.sum) / ((double)factor * (double)factor);
    tally->last = (int)(largest >> MANTISSA);
    see_max_abs(tally, value_of(largest));
    return 1;
}

/* A copy with zeros for what is not finite, which is counted. */
static TARGET void NAME(take_nonfinite)(const float *restrict x, size_t n, float *restrict finite,
                                        struct tally *tally)
{
    uint32_t n_inf = 0, n_nan = 0;
#pragma omp simd reduction(+ : n_inf, n_nan)
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]);
        int32_t size = (int32_t)(bits & MAGNITUDE);
        n_inf += size == INFINITE;
        n_nan += size > INFINITE;
        finite[i] = float_of(size < INFINITE ? bits : 0);
    }
    tally->n_inf += n_inf;
    tally->n_nan += n_nan;
}

static TARGET void NAME(count)(const float *x, size_t n, struct tally *tally)
{
    if (n <= FEW) {
        NAME(count_any)(x, n, tally);
        return;
    }
    struct NAME(span) span;
    NAME(cut)(&span, x, FLOAT32, n);
    if (NAME(count_finite)(&span, FLOAT32, tally))
        return;
    float finite[BLOCK];
    NAME(take_nonfinite)(x, n, finite, tally);
    NAME(cut)(&span, finite, FLOAT32, n);
    NAME(count_finite)(&span, FLOAT32, tally);
}

#ifdef READS_16_BITS
/* What is beyond LIMIT, or only a few, is counted as float32. */
static TARGET void NAME(count_float16)(const uint16_t *x, size_t n, struct tally *tally)
{
    struct NAME(span) span;
    NAME(cut)(&span, x, FLOAT16, n);
    if (n > FEW && NAME(count_finite)(&span, FLOAT16, tally))
        return;
    float wide[BLOCK];
    NAME(widen_float16)(x, n, wide);
    NAME(count)(wide, n, tally);
}

static TARGET void NAME(count_bfloat16)(const uint16_t *x, size_t n, struct tally *tally)
{
    struct NAME(span) span;
    NAME(cut)(&span, x, BFLOAT16, n);
    if (n > FEW && NAME(count_finite)(&span, BFLOAT16, tally))
        return;
    float wide[BLOCK];
    NAME(widen_bfloat16)(x, n, wide);
    NAME(count)(wide, n, tally);
}
#endif
