/* The work on a block in plain C, for any values and any processor; the compiler makes vectors of the loops marked
 * `simd`. Included once for each instruction set, with TARGET (the attribute that names it) and NAME (a suffix). */

static TARGET void NAME(add_bins)(const uint8_t *restrict bin, size_t n, uint32_t *restrict hist)
{
    /* Neighbours are alike: counted into one table, each would wait for the store of the one before. */
    uint32_t table[4][HIST_BINS + 1];
    size_t i = 0;
    if (n >= 512) {
        memset(table, 0, sizeof table);
        for (; i + 4 <= n; i += 4)
            for (int k = 0; k < 4; k++)
                table[k][bin[i + k]]++;
        for (int b = 0; b < HIST_BINS; b++)
            hist[b] += table[0][b] + table[1][b] + table[2][b] + table[3][b];
    }
    for (; i < n; i++)
        hist[bin[i]]++;
}

static TARGET void NAME(add_histogram)(const float *restrict x, size_t n, uint32_t *restrict hist)
{
    uint8_t bin[BLOCK];
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        int32_t size = (int32_t)(bits_of(x[i]) & MAGNITUDE);
        int b = bin_of((size >> MANTISSA) - BIAS);
        bin[i] = (uint8_t)(((size != 0) & (size < INFINITE)) ? b : NO_BIN);
    }
    NAME(add_bins)(bin, n, hist);
}

/* 1 if a finite magnitude is no float16: it has more than eleven significant bits, or is no multiple of 2^-24, or
 * is beyond 65504. */
static inline TARGET uint32_t NAME(off_float16)(int32_t size)
{
    /* What is below 2^-14, the smallest normal float16, in units of 2^-24; both are powers of two, so it is exact. */
    float units = float_of(size < 0x38800000 ? (uint32_t)size : 0x38800000) * 0x1p24f;
    int subnormal = (size != 0) & (size < 0x800000); /* of float32: a processor may be set to take it as zero */
    return ((size & 0x1fff) != 0) | ((float)(int32_t)units != units) | subnormal | (size >= 0x47800000);
}

static TARGET void NAME(count_any)(const float *restrict x, size_t n, struct tally *tally)
{
    uint32_t n_inf = 0, n_nan = 0, off = 0, off_bf16 = 0;
    int32_t largest = 0;
    double sum_sq = 0;
#pragma omp simd reduction(+ : n_inf, n_nan, off, off_bf16, sum_sq) reduction(max : largest)
    for (size_t i = 0; i < n; i++) {
        int32_t size = (int32_t)(bits_of(x[i]) & MAGNITUDE);
        n_inf += size == INFINITE;
        n_nan += size > INFINITE;
        int32_t finite = size < INFINITE ? size : 0;
        off += NAME(off_float16)(finite);
        off_bf16 += (finite & 0xffff) != 0;
        largest = finite > largest ? finite : largest;
        double value = float_of((uint32_t)finite);
        sum_sq += value * value;
    }
    NAME(add_histogram)(x, n, tally->hist);
    tally->n_inf += n_inf;
    tally->n_nan += n_nan;
    tally->n_offgrid += off;
    tally->n_offgrid_bf16 += off_bf16;
    tally->sum_sq += sum_sq;
    see_max_abs(tally, value_of((uint32_t)largest));
}

/* 1 if a finite magnitude is not of the format whose mantissa has `fraction` bits, which is normal from 2^least
 * and ends below 2^limit. */
static inline TARGET uint32_t NAME(off_format)(uint64_t size, int fraction, int least, int limit)
{
    int log2 = (int)(size >> 52) - 1023;
    int lost = least - log2; /* bits that a subnormal of the format has less */
    lost = lost < 0 ? 0 : lost;
    lost = lost > fraction + 1 ? fraction + 1 : lost; /* not even the first bit is left */
    uint64_t significand = (size & 0xfffffffffffff) | 0x10000000000000;
    uint64_t below = ((uint64_t)1 << (52 - fraction + lost)) - 1;
    return (((significand & below) != 0) & (size != 0)) | (log2 >= limit);
}

static TARGET void NAME(count_any_float64)(const double *restrict x, size_t n, struct tally *tally)
{
    const uint64_t infinite = 0x7ff0000000000000;
    uint8_t bin[BLOCK];
    uint64_t largest = 0;
    double sum_sq = 0, max_abs;
    for (size_t i = 0; i < n; i++) {
        uint64_t size;
        memcpy(&size, x + i, sizeof size);
        size &= ~((uint64_t)1 << 63);
        tally->n_inf += size == infinite;
        tally->n_nan += size > infinite;
        uint64_t finite = size < infinite ? size : 0;
        bin[i] = (uint8_t)(finite ? bin_of((int)(finite >> 52) - 1023) : NO_BIN);
        tally->n_offgrid += NAME(off_format)(finite, 10, -14, 16);
        tally->n_offgrid_bf16 += NAME(off_format)(finite, 7, -126, 128);
        largest = finite > largest ? finite : largest;
        double value;
        memcpy(&value, &finite, sizeof value);
        sum_sq += value * value;
    }
    NAME(add_bins)(bin, n, tally->hist);
    tally->sum_sq += sum_sq;
    memcpy(&max_abs, &largest, sizeof max_abs);
    see_max_abs(tally, max_abs);
}

static TARGET void NAME(count)(const float *x, size_t n, struct tally *tally);

/* Magnitudes as float32 in which all that is counted stands as it did: cut off, and with the last bit set if that has
 * lost something. Answers 0 where float32 has no such number: one is not finite, or beyond its normal numbers. */
static TARGET int NAME(narrow)(const double *restrict x, size_t n, float *restrict narrow, double *max_abs,
                               double *sum_sq)
{
    const uint64_t cut = ((uint64_t)1 << (52 - MANTISSA)) - 1; /* bits that a float32 has not */
    const uint64_t least = (uint64_t)(1023 - 126) << 52;        /* the bits of 2^-126 */
    uint64_t small = 0;                                         /* its sign, if any is below and not zero */
    double largest = 0, sum = 0;
#pragma omp simd reduction(max : largest) reduction(| : small) reduction(+ : sum)
    for (size_t i = 0; i < n; i++) {
        double size = __builtin_fabs(x[i]);
        largest = size > largest ? size : largest;
        sum += size * size;
        uint64_t bits;
        memcpy(&bits, &size, sizeof bits);
        small |= (bits - least) & -bits;
        bits = (bits | ((bits & cut) + cut)) & ~cut;
        memcpy(&size, &bits, sizeof bits);
        narrow[i] = (float)size;
    }
    *max_abs = largest;
    *sum_sq = sum;
    return !(small >> 63) && largest < 0x1p128 && sum == sum;
}

static TARGET void NAME(count_float64)(const double *x, size_t n, struct tally *tally)
{
    float narrow[BLOCK];
    double max_abs, sum_sq = tally->sum_sq, added;
    if (n <= FEW || !NAME(narrow)(x, n, narrow, &max_abs, &added)) {
        NAME(count_any_float64)(x, n, tally);
        return;
    }
    double before = tally->max_abs;
    NAME(count)(narrow, n, tally);
    tally->sum_sq = sum_sq + added;
    tally->max_abs = before;
    see_max_abs(tally, max_abs);
}

static inline TARGET float NAME(from_float16)(uint16_t half)
{
    uint32_t exponent = half >> 10 & 31, mantissa = half & 0x3ff;
    uint32_t normal = (exponent + BIAS - 15) << MANTISSA | mantissa << 13;
    uint32_t special = INFINITE | mantissa << 13;
    uint32_t subnormal = bits_of((float)(int32_t)mantissa * 0x1p-24f);
    uint32_t size = exponent == 0 ? subnormal : exponent == 31 ? special : normal;
    return float_of((uint32_t)(half & 0x8000) << 16 | size);
}

/* To nearest, ties to even. A NaN keeps its sign and the first of its bits; torch's op decides (cpu.py). */
static inline TARGET uint16_t NAME(to_float16)(float x)
{
    uint32_t bits = bits_of(x), size = bits & MAGNITUDE;
    uint32_t normal = (size - ((BIAS - 15) << MANTISSA) + 0xfff + (size >> 13 & 1)) >> 13;
    /* The last bit of a float32 from 0.5 is worth 2^-24, as that of a subnormal float16 is: the sum is rounded to
     * it, and counts in it. */
    uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t special = size > INFINITE ? 0x7e00 | (size >> 13 & 0x3ff) : 0x7c00;
    uint32_t half = size < 0x38800000 ? subnormal : size < 0x47800000 ? normal : special;
    return (uint16_t)((bits >> 16 & 0x8000) | half);
}

static inline TARGET float NAME(from_bfloat16)(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* As to_float16, of the product of a bfloat16 and a number: if that is NaN, its lower half is 0, and it stays NaN. */
static inline TARGET uint16_t NAME(to_bfloat16)(float x)
{
    uint32_t bits = bits_of(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Those that are left of what has been done in vectors of our own. */
static TARGET void NAME(widen_float16)(const uint16_t *restrict x, size_t n, float *restrict wide)
{
#pragma omp simd
    for (size_t i = NAME(widen_float16_vectors)(x, n, wide); i < n; i++)
        wide[i] = NAME(from_float16)(x[i]);
}

static TARGET void NAME(widen_bfloat16)(const uint16_t *restrict x, size_t n, float *restrict wide)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        wide[i] = NAME(from_bfloat16)(x[i]);
}

#ifndef READS_16_BITS
static TARGET void NAME(count_float16)(const uint16_t *x, size_t n, struct tally *tally)
{
    float wide[BLOCK];
    NAME(widen_float16)(x, n, wide);
    NAME(count)(wide, n, tally);
}

static TARGET void NAME(count_bfloat16)(const uint16_t *x, size_t n, struct tally *tally)
{
    float wide[BLOCK];
    NAME(widen_bfloat16)(x, n, wide);
    NAME(count)(wide, n, tally);
}
#endif

static TARGET void NAME(unscale_float16)(uint16_t *x, size_t n, float inv_scale)
{
#pragma omp simd
    for (size_t i = NAME(unscale_float16_vectors)(x, n, inv_scale); i < n; i++)
        x[i] = NAME(to_float16)(NAME(from_float16)(x[i]) * inv_scale);
}

static TARGET void NAME(unscale_bfloat16)(uint16_t *x, size_t n, float inv_scale)
{
#pragma omp simd
    for (size_t i = NAME(unscale_bfloat16_vectors)(x, n, inv_scale); i < n; i++)
        x[i] = NAME(to_bfloat16)(NAME(from_bfloat16)(x[i]) * inv_scale);
}

static TARGET void NAME(unscale_float32)(float *x, size_t n, float inv_scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        x[i] *= inv_scale;
}

static TARGET void NAME(unscale_float64)(double *x, size_t n, float inv_scale)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        x[i] *= (double)inv_scale;
}
