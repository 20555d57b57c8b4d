/* For plain.h: the vectors that it is left to the compiler to make. */

/* How many elements were converted in vectors: none, the compiler makes those. */
INLINE size_t NAME(widen_float16_vectors)(const uint16_t *x, size_t n, float *wide)
{
    (void)x, (void)n, (void)wide;
    return 0;
}

INLINE size_t NAME(unscale_float16_vectors)(uint16_t *x, size_t n, float inv_scale)
{
    (void)x, (void)n, (void)inv_scale;
    return 0;
}

INLINE size_t NAME(unscale_bfloat16_vectors)(uint16_t *x, size_t n, float inv_scale)
{
    (void)x, (void)n, (void)inv_scale;
    return 0;
}
