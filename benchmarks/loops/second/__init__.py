"""A second set of loops with models, data and names of its own, to judge rules that were mended by the first."""

from . import order, outputs, settings

__all__ = ["order", "outputs", "settings"]
