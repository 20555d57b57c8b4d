"""A fifth set, written from the list of kinds and the recipes alone; its author had read no rules and no figures."""

from . import gradients, handling, processes, quiet, scaling, values

__all__ = ["gradients", "handling", "processes", "quiet", "scaling", "values"]
