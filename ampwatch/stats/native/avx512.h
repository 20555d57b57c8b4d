/* Vectors of sixteen float32, for planes.h: AVX-512 F and nothing beyond it. */

#define TARGET __attribute__((target("avx512f,popcnt")))
#define NAME(x) x##_avx512
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 16
typedef __m512i NAME(bits);
typedef __m512 NAME(reals);

INLINE __m512i NAME(all)(uint32_t value) { return _mm512_set1_epi32((int)value); }
INLINE __m512i NAME(load)(const float *x) { return _mm512_loadu_si512(x); }
INLINE __m512i NAME(magnitude)(__m512i x) { return _mm512_and_si512(x, NAME(all)(MAGNITUDE)); }
INLINE __m512i NAME(larger)(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }

INLINE __m512i NAME(parity)(__m512i a, __m512i b, __m512i c)
{
    return _mm512_ternarylogic_epi32(a, b, c, 0x96);
}

INLINE __m512i NAME(majority)(__m512i a, __m512i b, __m512i c)
{
    return _mm512_ternarylogic_epi32(a, b, c, 0xe8);
}

/* The smaller of a and b, where b is not zero. */
INLINE __m512i NAME(smaller)(__m512i a, __m512i b)
{
    return _mm512_mask_min_epu32(a, _mm512_test_epi32_mask(b, b), a, b);
}

/* 1 << (exponent mod 32), or 0 for a zero. */
INLINE __m512i NAME(one_hot)(__m512i size)
{
    __m512i exponent = _mm512_srli_epi32(size, MANTISSA);
    return _mm512_maskz_rolv_epi32(_mm512_test_epi32_mask(size, size), NAME(all)(1), exponent);
}

/* 1 << (exponent - first), or 0 where that is no place of a word, and for a zero. */
INLINE __m512i NAME(one_hot_from)(__m512i size, int first)
{
    __m512i place = _mm512_sub_epi32(_mm512_srli_epi32(size, MANTISSA), NAME(all)((uint32_t)first));
    return _mm512_maskz_sllv_epi32(_mm512_test_epi32_mask(size, size), NAME(all)(1), place);
}

/* One more where no bit of the mask is set. */
INLINE __m512i NAME(count_clear)(__m512i count, __m512i x, uint32_t mask)
{
    return _mm512_mask_sub_epi32(count, _mm512_testn_epi32_mask(x, NAME(all)(mask)), count, NAME(all)(~0u));
}

INLINE __m512i NAME(count_float16)(__m512i count, __m512i size)
{
    __m256i half = _mm512_cvtps_ph(_mm512_castsi512_ps(size), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512i back = _mm512_castps_si512(_mm512_cvtph_ps(half));
    return _mm512_mask_sub_epi32(count, _mm512_cmpeq_epi32_mask(back, size), count, NAME(all)(~0u));
}

INLINE unsigned NAME(ones_at)(__m512i x, int place)
{
    return (unsigned)__builtin_popcount(_mm512_test_epi32_mask(x, NAME(all)(1u << place)));
}

INLINE __m512 NAME(add_square)(__m512 sum, const float *x, float factor)
{
    __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor));
    return _mm512_fmadd_ps(y, y, sum);
}
