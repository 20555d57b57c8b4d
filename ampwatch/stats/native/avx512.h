/* Vectors of sixteen float32, for planes.h: AVX-512 F and nothing beyond it. */

#define TARGET __attribute__((target("avx512f,avx2,f16c,fma,popcnt")))
#define NAME(x) x##_avx512
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 16
#define PLACES 32
typedef __m512i NAME(bits);
typedef __m512 NAME(reals);
typedef __m512i NAME(window); /* the exponent at place 0 */

INLINE __m512i NAME(all)(uint32_t value) { return _mm512_set1_epi32((int)value); }
#define READS_16_BITS
/* Elements of that format, as float32. */
INLINE __m512i NAME(load)(const void *x, enum format format)
{
    if (format == FLOAT16)
        return _mm512_castps_si512(_mm512_cvtph_ps(_mm256_loadu_si256(x)));
    if (format == BFLOAT16)
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(x)), 16);
    return _mm512_loadu_si512(x);
}

INLINE __m512i NAME(magnitude)(__m512i x) { return _mm512_and_si512(x, NAME(all)(MAGNITUDE)); }
INLINE __m512i NAME(larger)(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }

INLINE __m512i NAME(either)(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }

INLINE __m512i NAME(parity)(__m512i a, __m512i b, __m512i c)
{
    return _mm512_ternarylogic_epi32(a, b, c, 0x96);
}

INLINE __m512i NAME(majority)(__m512i a, __m512i b, __m512i c)
{
    return _mm512_ternarylogic_epi32(a, b, c, 0xe8);
}

INLINE __m512i NAME(window_from)(int first) { return NAME(all)((uint32_t)first); }

/* 1 << place of its exponent, or 0 where that is none of a word. */
INLINE __m512i NAME(one_hot)(__m512i size, __m512i first)
{
    return _mm512_sllv_epi32(NAME(all)(1), _mm512_sub_epi32(_mm512_srli_epi32(size, MANTISSA), first));
}

/* One more where the lower half is zero. */
INLINE __m512i NAME(more_bfloat16)(__m512i count, __m512i x)
{
    return _mm512_mask_sub_epi32(count, _mm512_testn_epi32_mask(x, NAME(all)(0xffff)), count, NAME(all)(~0u));
}

INLINE __m512i NAME(more_float16)(__m512i count, __m512i size)
{
    __m256i half = _mm512_cvtps_ph(_mm512_castsi512_ps(size), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512i back = _mm512_castps_si512(_mm512_cvtph_ps(half));
    return _mm512_mask_sub_epi32(count, _mm512_cmpeq_epi32_mask(back, size), count, NAME(all)(~0u));
}

/* The same of a bfloat16 below 2^16, whose eight bits are few enough: one more where it is a multiple of 2^-24, which
 * is the last bit of a float32 from 0.5. */
INLINE __m512i NAME(more_float16_of_bfloat16)(__m512i count, __m512i size)
{
    __m512 half = _mm512_set1_ps(0.5f);
    __m512 rounded = _mm512_sub_ps(_mm512_add_ps(_mm512_castsi512_ps(size), half), half);
    __mmask16 same = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(rounded), size);
    return _mm512_mask_sub_epi32(count, same, count, NAME(all)(~0u));
}

INLINE unsigned NAME(ones_at)(__m512i x, int place)
{
    return (unsigned)__builtin_popcount(_mm512_test_epi32_mask(x, NAME(all)(1u << place)));
}

INLINE __m512 NAME(add_square)(__m512 sum, __m512i x, float factor)
{
    __m512 y = _mm512_mul_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(factor));
    return _mm512_fmadd_ps(y, y, sum);
}

/* Each answers how many elements it has converted: whole vectors. */
INLINE size_t NAME(widen_float16_vectors)(const uint16_t *x, size_t n, float *wide)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm512_storeu_ps(wide + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
    return i;
}

INLINE size_t NAME(unscale_float16_vectors)(uint16_t *x, size_t n, float inv_scale)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i *at = (__m256i *)(x + i);
        __m512 y = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_loadu_si256(at)), _mm512_set1_ps(inv_scale));
        _mm256_storeu_si256(at, _mm512_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    return i;
}

/* As to_bfloat16. */
INLINE size_t NAME(unscale_bfloat16_vectors)(uint16_t *x, size_t n, float inv_scale)
{
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i *at = (__m256i *)(x + i);
        __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)), 16);
        __m512 y = _mm512_mul_ps(_mm512_castsi512_ps(wide), _mm512_set1_ps(inv_scale));
        __m512i bits = _mm512_castps_si512(y), upper = _mm512_srli_epi32(bits, 16);
        __m512i even = _mm512_add_epi32(_mm512_and_si512(upper, NAME(all)(1)), NAME(all)(0x7fff));
        __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, even), 16);
        _mm256_storeu_si256(at, _mm512_cvtepi32_epi16(rounded));
    }
    return i;
}
