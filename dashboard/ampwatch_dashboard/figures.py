"""Figures as data: the JSON of docs/rest.md in, `{"data", "layout"}` for `Plotly.react` out.

Pure functions over builtins. What they answer holds no NaN (a missing point is None), and every name that came
from a training job is escaped, since Plotly reads a subset of HTML in all of its text.
"""

from __future__ import annotations

from ._compare import compare
from ._heatmap import heatmap
from ._histogram import histogram
from ._replay import replay
from ._theme import Figure, Theme
from ._timeline import timeline

__all__ = ["Figure", "Theme", "compare", "heatmap", "histogram", "replay", "timeline"]
