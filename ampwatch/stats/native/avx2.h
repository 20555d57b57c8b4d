/* Vectors of eight float32, for planes.h: AVX2, FMA and F16C. */

#define TARGET __attribute__((target("avx2,fma,f16c,popcnt")))
#define NAME(x) x##_avx2
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 8
typedef __m256i NAME(bits);
typedef __m256 NAME(reals);

INLINE __m256i NAME(all)(uint32_t value) { return _mm256_set1_epi32((int)value); }
INLINE __m256i NAME(load)(const float *x) { return _mm256_loadu_si256((const __m256i *)x); }
INLINE __m256i NAME(magnitude)(__m256i x) { return _mm256_and_si256(x, NAME(all)(MAGNITUDE)); }
INLINE __m256i NAME(larger)(__m256i a, __m256i b) { return _mm256_max_epu32(a, b); }

INLINE __m256i NAME(parity)(__m256i a, __m256i b, __m256i c)
{
    return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}

INLINE __m256i NAME(majority)(__m256i a, __m256i b, __m256i c)
{
    return _mm256_or_si256(_mm256_and_si256(a, b), _mm256_and_si256(_mm256_xor_si256(a, b), c));
}

/* The smaller of a and b, where b is not zero. */
INLINE __m256i NAME(smaller)(__m256i a, __m256i b)
{
    return _mm256_min_epu32(a, _mm256_or_si256(b, _mm256_cmpeq_epi32(b, _mm256_setzero_si256())));
}

/* 1, or 0 for a zero. */
INLINE __m256i NAME(one)(__m256i size)
{
    return _mm256_andnot_si256(_mm256_cmpeq_epi32(size, _mm256_setzero_si256()), NAME(all)(1));
}

/* 1 << (exponent mod 32), or 0 for a zero. */
INLINE __m256i NAME(one_hot)(__m256i size)
{
    __m256i place = _mm256_and_si256(_mm256_srli_epi32(size, MANTISSA), NAME(all)(31));
    return _mm256_sllv_epi32(NAME(one)(size), place);
}

/* 1 << (exponent - first), or 0 where that is no place of a word, and for a zero. */
INLINE __m256i NAME(one_hot_from)(__m256i size, int first)
{
    __m256i place = _mm256_sub_epi32(_mm256_srli_epi32(size, MANTISSA), NAME(all)((uint32_t)first));
    return _mm256_sllv_epi32(NAME(one)(size), place);
}

/* One more where no bit of the mask is set. */
INLINE __m256i NAME(count_clear)(__m256i count, __m256i x, uint32_t mask)
{
    __m256i clear = _mm256_cmpeq_epi32(_mm256_and_si256(x, NAME(all)(mask)), _mm256_setzero_si256());
    return _mm256_sub_epi32(count, clear);
}

INLINE __m256i NAME(count_float16)(__m256i count, __m256i size)
{
    __m128i half = _mm256_cvtps_ph(_mm256_castsi256_ps(size), _MM_FROUND_TO_NEAREST_INT);
    __m256i back = _mm256_castps_si256(_mm256_cvtph_ps(half));
    return _mm256_sub_epi32(count, _mm256_cmpeq_epi32(back, size));
}

INLINE unsigned NAME(ones_at)(__m256i x, int place)
{
    __m256i at_sign = _mm256_sll_epi32(x, _mm_cvtsi32_si128(31 - place));
    return (unsigned)__builtin_popcount((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(at_sign)));
}

INLINE __m256 NAME(add_square)(__m256 sum, const float *x, float factor)
{
    __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(factor));
    return _mm256_fmadd_ps(y, y, sum);
}
