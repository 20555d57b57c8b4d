"""A sixth set of loops, by an examiner who has seen neither the rules nor what they were mended by."""

from . import code, numbers, sound, state

__all__ = ["code", "numbers", "sound", "state"]
