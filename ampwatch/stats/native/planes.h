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

INLINE struct NAME(view) NAME(look_at)(const float *x, size_t n, int first)
{
    struct NAME(view) view;
    memset(&view, 0, sizeof view);
    view.smallest = NAME(all)(~0u);
    for (size_t i = 0; i < n; i += NAME(STRIDE))
        NAME(look16)(&view, x + i, first);
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
    for (int exponent = first; exponent <= last; exponent++, place++) {
        uint32_t count = 0;
        for (int k = 0; n / LANES >> k; k++)
            count += NAME(ones_at)(view->plane[k], place & 31) << k;
        tally->hist[bin_of(exponent - BIAS)] += count;
    }
}

static TARGET void NAME(add_wide)(const float *x, size_t n, int first, int last, struct tally *tally)
{
    for (; first <= last; first += 32) {
        struct NAME(view) view = NAME(look_at)(x, n, first);
        NAME(add_planes)(&view, n, first, first + 31 < last ? first + 31 : last, 0, tally);
    }
}

/* Of n elements, a multiple of STRIDE, the largest of which has this exponent. In float32, multiplied by a power of
 * two so that no square is lost that counts. A lane adds at most BLOCK / 4 / LANES squares, so the error is below
 * 128 * 2^-24 = 8e-6 of the sum. */
static TARGET double NAME(sum_of_squares)(const float *x, size_t n, int exponent)
{
    int scale = 2 * BIAS - exponent;
    float factor = float_of((uint32_t)(scale < 1 ? 1 : scale) << MANTISSA), lane[LANES];
    NAME(reals) sum[4];
    memset(sum, 0, sizeof sum);
    for (size_t i = 0; i < n; i += 4 * LANES)
        for (int k = 0; k < 4; k++)
            sum[k] = NAME(add_square)(sum[k], x + i + k * LANES, factor);
    NAME(reals) rest = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    memcpy(lane, &rest, sizeof lane);
    double total = 0;
    for (int k = 0; k < LANES; k++)
        total += lane[k];
    return total / ((double)factor * (double)factor);
}

/* Counts n elements, a multiple of STRIDE; or answers 0, having counted nothing, if one is not finite. */
static TARGET int NAME(count_finite)(const float *x, size_t n, struct tally *tally)
{
    struct NAME(view) view = NAME(look_at)(x, n, NAME(ALL));
    uint32_t largest = NAME(largest)(view.largest);
    if (largest >= INFINITE)
        return 0;
    uint32_t smallest = ~NAME(largest)(~view.smallest);
    int first = (int)(smallest >> MANTISSA), last = (int)(largest >> MANTISSA);
    if (last - first < 32)
        NAME(add_planes)(&view, n, first, last, first, tally); /* none if all are zero: first is beyond last */
    else
        NAME(add_wide)(x, n, first, last, tally);
    tally->n_offgrid += (uint32_t)n - NAME(total)(view.n_float16);
    tally->n_offgrid_bf16 += (uint32_t)n - NAME(total)(view.n_bfloat16);
    tally->sum_sq += NAME(sum_of_squares)(x, n, last);
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

static TARGET void NAME(count_whole)(const float *x, size_t n, struct tally *tally)
{
    if (NAME(count_finite)(x, n, tally))
        return;
    float finite[BLOCK];
    NAME(take_nonfinite)(x, n, finite, tally);
    NAME(count_finite)(finite, n, tally);
}

static TARGET void NAME(count_planes)(const float *x, size_t n, struct tally *tally)
{
    size_t rest = n % NAME(STRIDE), padding = rest ? NAME(STRIDE) - rest : 0;
    if (!padding)
        NAME(count_whole)(x, n, tally);
    else if (n <= 32)
        NAME(count_any)(x, n, tally);
    else {
        float padded[BLOCK]; /* with zeros, which are in no bin and on every grid */
        memcpy(padded, x, n * sizeof *x);
        memset(padded + n, 0, padding * sizeof *x);
        NAME(count_whole)(padded, n + padding, tally);
    }
}
