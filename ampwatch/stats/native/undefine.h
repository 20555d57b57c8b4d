/* What a set of instructions has defined, before the next one. */
#undef TARGET
#undef NAME
#undef INLINE
#undef LANES
#undef PLACES
#undef READS_16_BITS
#undef LIMIT
