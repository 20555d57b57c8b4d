/* The statistics pass over gradients on a CPU, fused with the unscaling. reference.py says what it must equal.
 *
 * A plain shared library, called through ctypes: it knows neither Python nor torch. The work is cut into chunks
 * of one tensor each, which threads take one after another. Of a chunk one block after another is counted, then
 * unscaled, so that memory is read once and written once. */

#define _GNU_SOURCE
#include "pass.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#define KERNELS(isa)                                  \
    static const struct kernels kernels_##isa = {     \
        .count_float16 = count_float16_##isa,         \
        .count_bfloat16 = count_bfloat16_##isa,       \
        .count = count_##isa,                         \
        .count_float64 = count_float64_##isa,         \
        .unscale_float16 = unscale_float16_##isa,     \
        .unscale_bfloat16 = unscale_bfloat16_##isa,   \
        .unscale_float32 = unscale_float32_##isa,     \
        .unscale_float64 = unscale_float64_##isa,     \
    }

#if defined(__x86_64__) && !defined(PLAIN) /* defined by the test of what other processors get */
#define VECTORS
#include <cpuid.h>
#include <immintrin.h>
#include "sse2.h"
#include "plain.h"
#include "planes.h"
KERNELS(sse2);
#include "undefine.h"
#include "avx2.h"
#include "plain.h"
#include "planes.h"
KERNELS(avx2);
#include "undefine.h"
#include "avx512.h"
#include "plain.h"
#include "planes.h"
KERNELS(avx512);
#else
#include "portable.h"
#include "plain.h"
KERNELS(portable);
#endif

#define EXPORT __attribute__((visibility("default")))

enum instructions { PORTABLE, AVX2, AVX512 };
enum { CHUNK = 1 << 16 };       /* elements that a thread takes at once */
enum { EACH_THREAD = 1 << 19 }; /* elements, more than 0.1 ms, for which a thread is worth its start */

/* Columns of a row: layout.SCALARS, then the histogram. */
enum { NUMEL, N_INF, N_NAN, N_ZERO, N_SUBNORMAL, N_BELOW, N_OFFGRID, N_OFFGRID_BF16, MAX_ABS, SUM_SQ, HIST };
enum { WIDTH = HIST + HIST_BINS };

static const int64_t bytes_of[] = {2, 2, 4, 8};

#include "dense.h"

/* GOMP_parallel, the entry of an OpenMP runtime: calls `part(data)` on as many threads as said. */
typedef void fork_join(void (*part)(void *), void *data, unsigned threads, unsigned flags);

struct range {
    int64_t start, stop;
};

struct pass {
    int64_t n;
    const int64_t *addresses, *numels;
    const uint8_t *formats; /* of enum format */
    double *rows;           /* n of WIDTH */
    float inv_scale;        /* 1: the gradients are only read */
    const struct kernels *kernels;
    int64_t *first_chunk; /* n + 1: the number of each tensor's first chunk */
    double *sum_sq;       /* of each chunk, added up in their order: no result depends on the threads */
    _Atomic int64_t next_chunk;
    pthread_mutex_t lock; /* of rows whose tensor has several chunks */
};

static void count_block(const struct kernels *kernels, enum format format, const void *x, size_t n,
                        struct tally *tally)
{
    switch (format) {
    case FLOAT16:
        kernels->count_float16(x, n, tally);
        break;
    case BFLOAT16:
        kernels->count_bfloat16(x, n, tally);
        break;
    case FLOAT32:
        kernels->count(x, n, tally);
        break;
    case FLOAT64:
        kernels->count_float64(x, n, tally);
        break;
    }
}

static void unscale_block(const struct kernels *kernels, enum format format, void *x, size_t n, float inv_scale)
{
    switch (format) {
    case FLOAT16:
        kernels->unscale_float16(x, n, inv_scale);
        break;
    case BFLOAT16:
        kernels->unscale_bfloat16(x, n, inv_scale);
        break;
    case FLOAT32:
        kernels->unscale_float32(x, n, inv_scale);
        break;
    case FLOAT64:
        kernels->unscale_float64(x, n, inv_scale);
        break;
    }
}

/* Three sums at a time: one would wait for itself. */
static double sum(const double *x, int64_t n)
{
    double one = 0, two = 0, three = 0;
    int64_t i = 0;
    for (; i + 3 <= n; i += 3) {
        one += x[i];
        two += x[i + 1];
        three += x[i + 2];
    }
    for (; i < n; i++)
        one += x[i];
    return one + two + three;
}

static void begin_row(double *row, const struct tally *tally)
{
    row[N_INF] = tally->n_inf;
    row[N_NAN] = tally->n_nan;
    row[N_OFFGRID] = tally->n_offgrid;
    row[N_OFFGRID_BF16] = tally->n_offgrid_bf16;
    row[MAX_ABS] = tally->max_abs;
    for (int b = 0; b < HIST_BINS; b++)
        row[HIST + b] = (int32_t)tally->hist[b]; /* at most CHUNK; converted in vectors if it has a sign */
}

static void add_to_row(double *row, const struct tally *tally)
{
    row[N_INF] += tally->n_inf;
    row[N_NAN] += tally->n_nan;
    row[N_OFFGRID] += tally->n_offgrid;
    row[N_OFFGRID_BF16] += tally->n_offgrid_bf16;
    row[MAX_ABS] = tally->max_abs > row[MAX_ABS] ? tally->max_abs : row[MAX_ABS];
    for (int b = 0; b < HIST_BINS; b++)
        row[HIST + b] += (int32_t)tally->hist[b];
}

static void do_chunk(struct pass *pass, int64_t tensor, int64_t chunk)
{
    enum format format = pass->formats[tensor];
    int64_t start = (chunk - pass->first_chunk[tensor]) * CHUNK, stop = start + CHUNK;
    if (stop > pass->numels[tensor])
        stop = pass->numels[tensor];
    struct tally tally = {0};
    for (int64_t i = start; i < stop; i += BLOCK) {
        void *block = (char *)(uintptr_t)pass->addresses[tensor] + i * bytes_of[format];
        size_t n = (size_t)(stop - i < BLOCK ? stop - i : BLOCK);
        count_block(pass->kernels, format, block, n, &tally);
        if (pass->inv_scale != 1)
            unscale_block(pass->kernels, format, block, n, pass->inv_scale);
    }
    pass->sum_sq[chunk] = tally.sum_sq;
    if (stop - start == pass->numels[tensor]) { /* no other thread has a part of it */
        begin_row(pass->rows + tensor * WIDTH, &tally);
        return;
    }
    pthread_mutex_lock(&pass->lock);
    add_to_row(pass->rows + tensor * WIDTH, &tally);
    pthread_mutex_unlock(&pass->lock);
}

static void do_chunks(void *argument)
{
    struct pass *pass = argument;
    int64_t tensor = 0, chunk;
    while ((chunk = pass->next_chunk++) < pass->first_chunk[pass->n]) {
        while (chunk >= pass->first_chunk[tensor + 1])
            tensor++;
        do_chunk(pass, tensor, chunk);
    }
}

static void *do_chunks_in_thread(void *pass)
{
    do_chunks(pass);
    return NULL;
}

/* Threads for this pass alone: none is left that could spin, or that a forked child would miss. */
static void on_own_threads(struct pass *pass, int threads)
{
    enum { MOST = 64 };
    pthread_t others[MOST];
    int started = 0;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the process */
    while (started < threads - 1 && started < MOST &&
           !pthread_create(others + started, NULL, do_chunks_in_thread, pass))
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    do_chunks(pass);
    while (started)
        pthread_join(others[--started], NULL);
}

static void run(struct pass *pass, int64_t elements, int threads, fork_join *team)
{
    int64_t useful = elements / EACH_THREAD;
    if (useful < 2 || threads < 2)
        do_chunks(pass);
    else if (team) /* all of them: a runtime that is asked for fewer threads ends the others */
        team(do_chunks, pass, (unsigned)threads, 0);
    else
        on_own_threads(pass, threads < useful ? threads : (int)useful);
}

/* What follows from the counts of a row. */
static void finish(const struct pass *pass, int64_t tensor)
{
    double *row = pass->rows + tensor * WIDTH;
    const int64_t *chunk = pass->first_chunk + tensor;
    row[NUMEL] = (double)pass->numels[tensor];
    const double *at_2_24 = row + HIST - 24 - HIST_LOG2_MIN, *at_2_14 = row + HIST - 14 - HIST_LOG2_MIN;
    row[N_BELOW] = sum(row + HIST, at_2_24 - (row + HIST));
    row[N_SUBNORMAL] = row[N_BELOW] + sum(at_2_24, at_2_14 - at_2_24);
    double binned = row[N_SUBNORMAL] + sum(at_2_14, row + HIST + HIST_BINS - at_2_14);
    row[N_ZERO] = row[NUMEL] - row[N_INF] - row[N_NAN] - binned;
    row[SUM_SQ] = sum(pass->sum_sq + chunk[0], chunk[1] - chunk[0]);
}

/* Sorts n ranges by their start, digit by digit from the last: comparing them would take longer than to count a small
 * tensor. `other` is memory for as many; answers where they are. */
static struct range *sorted(struct range *ranges, struct range *other, size_t n)
{
    enum { DIGIT = 11, DIGITS = 1 << DIGIT };
    int64_t first = INT64_MAX, last = 0;
    for (size_t i = 0; i < n; i++) {
        first = ranges[i].start < first ? ranges[i].start : first;
        last = ranges[i].start > last ? ranges[i].start : last;
    }
    for (int shift = 0; n && (last - first) >> shift; shift += DIGIT) {
        uint32_t place[DIGITS] = {0}, sum = 0;
        for (size_t i = 0; i < n; i++)
            place[(ranges[i].start - first) >> shift & (DIGITS - 1)]++;
        for (int d = 0; d < DIGITS; d++) {
            uint32_t count = place[d];
            place[d] = sum;
            sum += count;
        }
        for (size_t i = 0; i < n; i++)
            other[place[(ranges[i].start - first) >> shift & (DIGITS - 1)]++] = ranges[i];
        struct range *swap = ranges;
        ranges = other;
        other = swap;
    }
    return ranges;
}

/* Whether no two tensors share memory. `ranges` is memory for two of each. */
static int disjoint(const struct pass *pass, struct range *ranges)
{
    size_t n = 0;
    for (int64_t i = 0; i < pass->n; i++)
        if (pass->numels[i]) {
            ranges[n].start = pass->addresses[i];
            ranges[n++].stop = pass->addresses[i] + pass->numels[i] * bytes_of[pass->formats[i]];
        }
    ranges = sorted(ranges, ranges + n, n);
    for (size_t i = 1; i < n; i++)
        if (ranges[i].start < ranges[i - 1].stop)
            return 0;
    return 1;
}

static int64_t chunks_of(int64_t numel)
{
    return (numel + CHUNK - 1) / CHUNK;
}

/* Memory for `disjoint`, `first_chunk` and `sum_sq`, of which the second is filled. NULL if there is none. */
static struct range *plan(struct pass *pass)
{
    size_t n = (size_t)pass->n + 1, chunks = 0;
    for (int64_t i = 0; i < pass->n; i++)
        chunks += (size_t)chunks_of(pass->numels[i]);
    struct range *ranges =
        malloc(2 * n * sizeof *ranges + n * sizeof *pass->first_chunk + chunks * sizeof *pass->sum_sq);
    if (!ranges)
        return NULL;
    pass->first_chunk = (int64_t *)(ranges + 2 * n);
    pass->sum_sq = (double *)(pass->first_chunk + n);
    pass->first_chunk[0] = 0;
    for (int64_t i = 0; i < pass->n; i++)
        pass->first_chunk[i + 1] = pass->first_chunk[i] + chunks_of(pass->numels[i]);
    return ranges;
}

static const struct kernels *kernels_for(int instructions)
{
#ifdef VECTORS
    return instructions == AVX512 ? &kernels_avx512 : instructions == AVX2 ? &kernels_avx2 : &kernels_sse2;
#else
    (void)instructions;
    return &kernels_portable;
#endif
}

/* The version of what follows; cpu.py calls no other. */
EXPORT int ampwatch_interface(void)
{
    return 2;
}

/* The best instructions that this processor and its system have, an enum instructions. */
EXPORT int ampwatch_instructions(void)
{
#ifdef VECTORS
    unsigned a, b, c, d;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
        (c & bit_F16C))
        return __builtin_cpu_supports("avx512f") ? AVX512 : AVX2;
#endif
    return PORTABLE;
}

/* The statistics of n tensors that are dense in memory, and their unscaling.
 *
 * `addresses`, `numels` and `formats` (enum format) describe the tensors; `rows`, n of WIDTH, takes their
 * statistics. If `inv_scale` is not NULL, the tensors are multiplied by it, and `found_inf` becomes 1 if an
 * element was not finite. At most `threads` work on it: those of `team`, or its own if that is NULL.
 * Answers 1, or 0 if it has done nothing: if tensors share memory, or there is none to plan with. */
EXPORT int ampwatch_pass(int64_t n, const int64_t *addresses, const int64_t *numels, const uint8_t *formats,
                         double *rows, const float *inv_scale, float *found_inf, int threads, int instructions,
                         fork_join *team)
{
    struct pass pass = {
        .n = n,
        .addresses = addresses,
        .numels = numels,
        .formats = formats,
        .rows = rows,
        .inv_scale = inv_scale ? *inv_scale : 1, /* by 1 torch's op does not multiply either */
        .kernels = kernels_for(instructions),
        .lock = PTHREAD_MUTEX_INITIALIZER,
    };
    struct range *ranges = plan(&pass);
    if (!ranges)
        return 0;
    if (!disjoint(&pass, ranges)) {
        free(ranges);
        return 0;
    }
    int64_t elements = 0;
    for (int64_t i = 0; i < n; i++) {
        elements += numels[i];
        if (chunks_of(numels[i]) != 1) /* else do_chunk begins it */
            memset(rows + i * WIDTH, 0, WIDTH * sizeof *rows);
    }
    run(&pass, elements, threads, team);
    for (int64_t i = 0; i < n; i++) {
        finish(&pass, i);
        if (inv_scale && rows[i * WIDTH + N_INF] + rows[i * WIDTH + N_NAN] > 0)
            *found_inf = 1;
    }
    free(ranges);
    return 1;
}
