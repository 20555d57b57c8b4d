"""A fourth set, for every kind that a CPU can have; its author had read no rules and no other set's figures."""

from . import order, passes, ranges, ranks, sound, weights

__all__ = ["order", "passes", "ranges", "ranks", "sound", "weights"]
