/* For plain.h alone: a processor for which there are no vectors of our own. */

#define TARGET
#define NAME(x) x##_portable
#define INLINE static inline

static void count_any_portable(const float *restrict x, size_t n, struct tally *tally);

static void count_portable(const float *x, size_t n, struct tally *tally) { count_any_portable(x, n, tally); }

#include "compilers.h"
