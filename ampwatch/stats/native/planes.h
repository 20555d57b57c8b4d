/* The count of a block in vectors, its histogram without a table.
 *
 * A non-zero element is turned into a word with one bit, at its exponent mod 32. To count the elements of each
 * exponent is then to count, place by place, the bits of many words, and a carry-save adder does that for three
 * words at a time (Harley and Seal's population count): plane[k] holds digit k of the count of each place, in each
 * lane. Which multiple of 32 belongs to an exponent is known where the exponents of a block span less than 32. Where
 * they span more, the block is looked at once more for each 32 of them.
 *
 * Needs the primitives of avx512.h or avx2.h. */

enum {
    NAME(STRIDE) = 16 * LANES, /* elements of one turn of the loop */
    NAME(PLANES) = LANES == 16 ? 9 : 10, /* digits of BLOCK / LANES, which is 2^8 or 2^9 */
    NAME(ALL) = -1,
};

/* Elements in whole strides, and a rest that is filled up with zeros, which are in no bin and on every grid. */
struct NAME(span) {
    const float *x;
    size_t n, whole;
    float rest[NAME(STRIDE)];
};

struct NAME(view) {
    NAME(bits) plane[NAME(PLANES)];
    NAME(bits) largest, smallest, n_float16, n_bfloat16;
};

INLINE NAME(bits) NAME(add)(NAME(bits) *plane, NAME(bits) a, NAME(bits) b)
{
    NAME(bits) carry = NAME(majority)(*plane, a, b);
    *plane = NAME(parity)(*plane, a, b);
    return carry;
}

/* What is asked of LANES elements. The words with one bit are for `plane`: those of all elements, after everything
 * else has been noted, or only of those with one of the 32 exponents from `first`. */
INLINE NAME(bits) NAME(look)(struct NAME(view) *view, const float *x, int first)
{
    NAME(bits) bits = NAME(load)(x), size = NAME(magnitude)(bits);
    if (first != NAME(ALL))
        return NAME(one_hot_from)(size, first);
    __builtin_prefetch(x + BLOCK); /* while this block is summed and unscaled, the next is under way */
    view->largest = NAME(larger)(view->largest, size);
    view->smallest = NAME(smaller)(view->smallest, size);
    view->n_float16 = NAME(count_float16)(view->n_float16, size);
    view->n_bfloat16 = NAME(count_clear)(view->n_bfloat16, bits, 0xffff);
    return NAME(one_hot)(size);
}

INLINE NAME(bits) NAME(look2)(struct NAME(view) *view, const float *x, int first)
{
    NAME(bits) one = NAME(look)(view, x, first), other = NAME(look)(view, x + LANES, first);
    return NAME(add)(view->plane, one, other);
}

INLINE NAME(bits) NAME(look4)(struct NAME(view) *view, const float *x, int first)
{
    NAME(bits) one = NAME(look2)(view, x, first), other = NAME(look2)(view, x + 2 * LANES, first);
    return NAME(add)(view->plane + 1, one, other);
}

INLINE NAME(bits) NAME(look8)(struct NAME(view) *view, const float *x, int first)
{
    NAME(bits) one = NAME(look4)(view, x, first), other = NAME(look4)(view, x + 4 * LANES, first);
    return NAME(add)(view->plane + 2, one, other);
}

INLINE void NAME(look16)(struct NAME(view) *view, const float *x, int first)
{
    NAME(bits) one = NAME(look8)(view, x, first), other = NAME(look8)(view, x + 8 * LANES, first);
    NAME(bits) carry = NAME(add)(view->plane + 3, one, other);
    for (int k = 4; k < NAME(PLANES); k++)
        carry = NAME(add)(view->plane + k, carry, NAME(all)(0));
}

INLINE void NAME(cut)(struct NAME(span) *span, const float *x, size_t n)
{
    size_t rest = n % NAME(STRIDE);
    span->x = x;
    span->n = n;
    span->whole = n - rest;
    if (rest) {
        memset(span->rest + rest, 0, (NAME(STRIDE) - rest) * sizeof *x);
        memcpy(span->rest, x + span->whole, rest * sizeof *x);
    }
}

/* Its elements with the zeros. */
INLINE size_t NAME(filled)(const struct NAME(span) *span)
{
    return span->whole + (span->n > span->whole ? NAME(STRIDE) : 0);
}

INLINE struct NAME(view) NAME(look_at)(const struct NAME(span) *span, int first)
{
    struct NAME(view) view;
    memset(&view, 0, sizeof view);
    view.smallest = NAME(all)(~0u);
    for (size_t i = 0; i < span->whole; i += NAME(STRIDE))
        NAME(look16)(&view, span->x + i, first);
    if (span->n > span->whole)
        NAME(look16)(&view, span->rest, first);
    return view;
}

INLINE uint32_t NAME(total)(NAME(bits) x)
{
    uint32_t lane[LANES];
    memcpy(lane, &x, sizeof lane);
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += lane[i];
    return sum;
}

INLINE uint32_t NAME(largest)(NAME(bits) x)
{
    uint32_t lane[LANES], largest = 0;
    memcpy(lane, &x, sizeof lane);
    for (int i = 0; i < LANES; i++)
        largest = lane[i] > largest ? lane[i] : largest;
    return largest;
}

/* Adds the counts of the exponents from first to last, the first of which is at bit `place`. */
INLINE void NAME(add_planes)(const struct NAME(view) *view, size_t n, int first, int last, int place,
                             struct tally *tally)
{
    size_t most = (n + LANES - 1) / LANES; /* in a lane */
    for (int exponent = first; exponent <= last; exponent++, place++) {
        uint32_t count = 0;
        for (int k = 0; most >> k; k++)
            count += NAME(ones_at)(view->plane[k], place & 31) << k;
        tally->hist[bin_of(exponent - BIAS)] += count;
    }
}

static TARGET void NAME(add_wide)(const struct NAME(span) *span, int first, int last, struct tally *tally)
{
    for (; first <= last; first += 32) {
        struct NAME(view) view = NAME(look_at)(span, first);
        NAME(add_planes)(&view, span->n, first, first + 31 < last ? first + 31 : last, 0, tally);
    }
}

INLINE void NAME(add_squares)(NAME(reals) *sum, const float *x, size_t n, float factor)
{
    for (size_t i = 0; i < n; i += 4 * LANES)
        for (int k = 0; k < 4; k++)
            sum[k] = NAME(add_square)(sum[k], x + i + k * LANES, factor);
}

/* Of elements the largest of which has this exponent. In float32, multiplied by a power of two so that no square is
 * lost that counts. A lane adds at most BLOCK / 4 / LANES squares, so the error is below 128 * 2^-24 = 8e-6 of the
 * sum. */
static TARGET double NAME(sum_of_squares)(const struct NAME(span) *span, int exponent)
{
    int scale = 2 * BIAS - exponent;
    float factor = float_of((uint32_t)(scale < 1 ? 1 : scale) << MANTISSA), lane[LANES];
    NAME(reals) sum[4];
    memset(sum, 0, sizeof sum);
    NAME(add_squares)(sum, span->x, span->whole, factor);
    NAME(add_squares)(sum, span->rest, (span->n - span->whole + 4 * LANES - 1) / (4 * LANES) * (4 * LANES), factor);
    NAME(reals) rest = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    memcpy(lane, &rest, sizeof lane);
    double total = 0;
    for (int k = 0; k < LANES; k++)
        total += lane[k];
    return total / ((double)factor * (double)factor);
}

/* Counts what is there; or answers 0, having counted nothing, if an element is not finite. */
static TARGET int NAME(count_finite)(const struct NAME(span) *span, struct tally *tally)
{
    struct NAME(view) view = NAME(look_at)(span, NAME(ALL));
    uint32_t largest = NAME(largest)(view.largest), n = (uint32_t)NAME(filled)(span);
    if (largest >= INFINITE)
        return 0;
    uint32_t smallest = ~NAME(largest)(~view.smallest);
    int first = (int)(smallest >> MANTISSA), last = (int)(largest >> MANTISSA);
    if (last - first < 32)
        NAME(add_planes)(&view, span->n, first, last, first, tally); /* none if all are zero: first is beyond last */
    else
        NAME(add_wide)(span, first, last, tally);
    tally->n_offgrid += n - NAME(total)(view.n_float16);
    tally->n_offgrid_bf16 += n - NAME(total)(view.n_bfloat16);
    tally->sum_sq += NAME(sum_of_squares)(span, last);
    see_max_abs(tally, float_of(largest));
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

static TARGET void NAME(count_planes)(const float *x, size_t n, struct tally *tally)
{
    if (n <= FEW) {
        NAME(count_any)(x, n, tally);
        return;
    }
    struct NAME(span) span;
    NAME(cut)(&span, x, n);
    if (NAME(count_finite)(&span, tally))
        return;
    float finite[BLOCK];
    NAME(take_nonfinite)(x, n, finite, tally);
    NAME(cut)(&span, finite, n);
    NAME(count_finite)(&span, tally);
}
