"""The dashboard: pages that a browser runs without a build step, and the figures that they draw.

`STATIC` holds the pages, style sheets and ES modules; `figures` turns the JSON of the REST API into Plotly
figures as data. Both are served by `ampwatch_server`; this package imports neither it nor `ampwatch`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

STATIC: Final = Path(__file__).parent / "static"
"""Directory of the files served under `/static`; `index.html` and `run.html` are the pages."""

__all__ = ["STATIC"]
