/* Vectors of eight float32, for planes.h: AVX2, FMA and F16C. */

#define TARGET __attribute__((target("avx2,fma,f16c,popcnt")))
#define NAME(x) x##_avx2
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 8
#define PLACES 32
typedef __m256i NAME(bits);
typedef __m256 NAME(reals);
typedef __m256i NAME(window); /* the exponent at place 0 */

INLINE __m256i NAME(all)(uint32_t value) { return _mm256_set1_epi32((int)value); }
#define READS_16_BITS
/* Elements of that format, as float32. */
INLINE __m256i NAME(load)(const void *x, enum format format)
{
    if (format == FLOAT16)
        return _mm256_castps_si256(_mm256_cvtph_ps(_mm_loadu_si128(x)));
    if (format == BFLOAT16)
        return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(x)), 16);
    return _mm256_loadu_si256(x);
}

INLINE __m256i NAME(magnitude)(__m256i x) { return _mm256_and_si256(x, NAME(all)(MAGNITUDE)); }
INLINE __m256i NAME(larger)(__m256i a, __m256i b) { return _mm256_max_epu32(a, b); }

INLINE __m256i NAME(either)(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }

INLINE __m256i NAME(parity)(__m256i a, __m256i b, __m256i c)
{
    return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}

INLINE __m256i NAME(majority)(__m256i a, __m256i b, __m256i c)
{
    return _mm256_or_si256(_mm256_and_si256(a, b), _mm256_and_si256(_mm256_xor_si256(a, b), c));
}

INLINE __m256i NAME(window_from)(int first) { return NAME(all)((uint32_t)first); }

/* 1 << place of its exponent, or 0 where that is none of a word. */
INLINE __m256i NAME(one_hot)(__m256i size, __m256i first)
{
    return _mm256_sllv_epi32(NAME(all)(1), _mm256_sub_epi32(_mm256_srli_epi32(size, MANTISSA), first));
}

/* One more where the lower half is zero; the upper half counts nothing that is wanted. */
INLINE __m256i NAME(more_bfloat16)(__m256i count, __m256i x)
{
    return _mm256_sub_epi16(count, _mm256_cmpeq_epi16(x, _mm256_setzero_si256()));
}

INLINE __m256i NAME(more_float16)(__m256i count, __m256i size)
{
    __m128i half = _mm256_cvtps_ph(_mm256_castsi256_ps(size), _MM_FROUND_TO_NEAREST_INT);
    __m256i back = _mm256_castps_si256(_mm256_cvtph_ps(half));
    return _mm256_sub_epi32(count, _mm256_cmpeq_epi32(back, size));
}

/* The same of a bfloat16 below 2^16, whose eight bits are few enough: one more where it is a multiple of 2^-24, which
 * is the last bit of a float32 from 0.5. */
INLINE __m256i NAME(more_float16_of_bfloat16)(__m256i count, __m256i size)
{
    __m256 half = _mm256_set1_ps(0.5f);
    __m256 rounded = _mm256_sub_ps(_mm256_add_ps(_mm256_castsi256_ps(size), half), half);
    return _mm256_sub_epi32(count, _mm256_cmpeq_epi32(_mm256_castps_si256(rounded), size));
}

INLINE unsigned NAME(ones_at)(__m256i x, int place)
{
    __m256i at_sign = _mm256_sll_epi32(x, _mm_cvtsi32_si128(31 - place));
    return (unsigned)__builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(at_sign)));
}

INLINE __m256 NAME(add_square)(__m256 sum, __m256i x, float factor)
{
    __m256 y = _mm256_mul_ps(_mm256_castsi256_ps(x), _mm256_set1_ps(factor));
    return _mm256_fmadd_ps(y, y, sum);
}

/* Each answers how many elements it has converted: whole vectors. */
INLINE size_t NAME(widen_float16_vectors)(const uint16_t *x, size_t n, float *wide)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    return i;
}

INLINE size_t NAME(unscale_float16_vectors)(uint16_t *x, size_t n, float inv_scale)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m128i *at = (__m128i *)(x + i);
        __m256 y = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_set1_ps(inv_scale));
        _mm_storeu_si128(at, _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
    }
    return i;
}

/* As to_bfloat16, in the lower half of each lane. */
INLINE __m256i NAME(unscaled_bfloat16)(__m128i x, float inv_scale)
{
    __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
    __m256 y = _mm256_mul_ps(_mm256_castsi256_ps(wide), _mm256_set1_ps(inv_scale));
    __m256i bits = _mm256_castps_si256(y), upper = _mm256_srli_epi32(bits, 16);
    __m256i even = _mm256_add_epi32(_mm256_and_si256(upper, NAME(all)(1)), NAME(all)(0x7fff));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, even), 16);
}

INLINE size_t NAME(unscale_bfloat16_vectors)(uint16_t *x, size_t n, float inv_scale)
{
    size_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        __m128i *at = (__m128i *)(x + i);
        __m256i one = NAME(unscaled_bfloat16)(_mm_loadu_si128(at), inv_scale);
        __m256i other = NAME(unscaled_bfloat16)(_mm_loadu_si128(at + 1), inv_scale);
        _mm256_storeu_si256((__m256i *)at, _mm256_permute4x64_epi64(_mm256_packus_epi32(one, other), 0xd8));
    }
    return i;
}
