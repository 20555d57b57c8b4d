/* What the parts of the CPU pass share: the numbers of a stretch of gradient, and the work on a block of it. */
#ifndef AMPWATCH_PASS_H
#define AMPWATCH_PASS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    BLOCK = 4096,        /* elements at once: counted, then unscaled while they are in the L1 cache */
    FEW = 32,            /* elements that are counted one by one */
    HIST_BINS = 64,      /* as layout.HIST_BINS */
    NO_BIN = HIST_BINS,  /* of zeros, infinities and NaN */
    HIST_LOG2_MIN = -48, /* as layout.HIST_LOG2_MIN */
    MANTISSA = 23,       /* bits of the mantissa of a float32, above which stands its exponent */
    BIAS = 127,          /* of that exponent */
};

enum format { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

#define MAGNITUDE 0x7fffffff /* a float32 without its sign: its bits are ordered as its magnitude is */
#define INFINITE 0x7f800000

/* Statistics of a chunk of gradient. What the layout has beyond these follows from them (finish in pass.c). */
struct tally {
    uint32_t n_inf, n_nan, n_offgrid, n_offgrid_bf16;
    uint32_t hist[HIST_BINS + 1]; /* with NO_BIN */
    double max_abs, sum_sq;
    int last; /* exponent of the largest magnitude of the block before; 0 if there is none */
};

/* The work on one block of at most BLOCK elements, compiled for one instruction set. */
struct kernels {
    void (*count_float16)(const uint16_t *x, size_t n, struct tally *tally);
    void (*count_bfloat16)(const uint16_t *x, size_t n, struct tally *tally);
    void (*count)(const float *x, size_t n, struct tally *tally);
    void (*count_float64)(const double *x, size_t n, struct tally *tally);
    void (*unscale_float16)(uint16_t *x, size_t n, float inv_scale);
    void (*unscale_bfloat16)(uint16_t *x, size_t n, float inv_scale);
    void (*unscale_float32)(float *x, size_t n, float inv_scale);
    void (*unscale_float64)(double *x, size_t n, float inv_scale);
};

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The value of a magnitude. A processor may be set to take a subnormal for zero where it converts it. */
static inline double value_of(uint32_t size)
{
    return size < (uint32_t)1 << MANTISSA ? size * 0x1p-149 : (double)float_of(size);
}

/* The bin of a value in [2^log2, 2^(log2 + 1)); beyond the ends of the histogram, its first or last. */
static inline int bin_of(int log2)
{
    int bin = log2 - HIST_LOG2_MIN;
    bin = bin < 0 ? 0 : bin;
    return bin < HIST_BINS ? bin : HIST_BINS - 1;
}

static inline void see_max_abs(struct tally *tally, double value)
{
    tally->max_abs = value > tally->max_abs ? value : tally->max_abs;
}

#endif
