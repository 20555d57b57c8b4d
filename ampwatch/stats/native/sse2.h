/* Vectors of four float32, for planes.h: what every x86-64 has. */

#define TARGET
#define NAME(x) x##_sse2
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 4
#define PLACES 31 /* that an int32 can be converted to */
typedef __m128i NAME(bits);
typedef __m128 NAME(reals);
typedef __m128 NAME(window); /* a power of two that makes the exponent at place 0 that of 1.0 */

INLINE __m128i NAME(all)(uint32_t value) { return _mm_set1_epi32((int)value); }
/* Only of float32: the others are widened before. */
INLINE __m128i NAME(load)(const void *x, enum format format)
{
    (void)format;
    return _mm_loadu_si128(x);
}

INLINE __m128i NAME(magnitude)(__m128i x) { return _mm_and_si128(x, NAME(all)(MAGNITUDE)); }

/* Of magnitudes. */
INLINE __m128i NAME(larger)(__m128i a, __m128i b)
{
    __m128i first = _mm_cmpgt_epi32(a, b);
    return _mm_or_si128(_mm_and_si128(first, a), _mm_andnot_si128(first, b));
}

INLINE __m128i NAME(either)(__m128i a, __m128i b) { return _mm_or_si128(a, b); }

INLINE __m128i NAME(parity)(__m128i a, __m128i b, __m128i c) { return _mm_xor_si128(_mm_xor_si128(a, b), c); }

INLINE __m128i NAME(majority)(__m128i a, __m128i b, __m128i c)
{
    return _mm_or_si128(_mm_and_si128(a, b), _mm_and_si128(_mm_xor_si128(a, b), c));
}

INLINE __m128 NAME(window_from)(int first)
{
    return _mm_set1_ps(float_of((uint32_t)(2 * BIAS - first) << MANTISSA));
}

/* 1 << place of its exponent: the power of two below it, as an integer. 0 below place 0, the last bit above PLACES. */
INLINE __m128i NAME(one_hot)(__m128i size, __m128 window)
{
    __m128 power = _mm_castsi128_ps(_mm_and_si128(size, NAME(all)(INFINITE)));
    return _mm_cvttps_epi32(_mm_mul_ps(power, window));
}

/* One more where the lower half is zero; the upper half counts nothing that is wanted. */
INLINE __m128i NAME(more_bfloat16)(__m128i count, __m128i x)
{
    return _mm_sub_epi16(count, _mm_cmpeq_epi16(x, _mm_setzero_si128()));
}

/* One more where it has at most eleven significant bits, is a multiple of 2^-24, which is the last bit of a float32
 * from 0.5, and is below 2^16. */
INLINE __m128i NAME(more_float16)(__m128i count, __m128i size)
{
    __m128i few = _mm_cmpeq_epi32(_mm_and_si128(size, NAME(all)(0x1fff)), _mm_setzero_si128());
    __m128 half = _mm_set1_ps(0.5f), rounded = _mm_sub_ps(_mm_add_ps(_mm_castsi128_ps(size), half), half);
    __m128i multiple = _mm_cmpeq_epi32(_mm_castps_si128(rounded), size);
    __m128i on_grid = _mm_and_si128(_mm_and_si128(few, multiple), _mm_cmplt_epi32(size, NAME(all)(0x47800000)));
    return _mm_sub_epi32(count, on_grid);
}

INLINE unsigned NAME(ones_at)(__m128i x, int place)
{
    __m128i at_sign = _mm_sll_epi32(x, _mm_cvtsi32_si128(31 - place));
    return (unsigned)(0x4332322132212110 >> 4 * _mm_movemask_ps(_mm_castsi128_ps(at_sign)) & 15);
}

INLINE __m128 NAME(add_square)(__m128 sum, __m128i x, float factor)
{
    __m128 y = _mm_mul_ps(_mm_castsi128_ps(x), _mm_set1_ps(factor));
    return _mm_add_ps(sum, _mm_mul_ps(y, y));
}

#include "compilers.h"
