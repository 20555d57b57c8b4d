"""Files of installed packages: no page loads anything from another host."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ampwatch.errors import MissingExtra


def package(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingExtra("the dashboard", "server")
    return Path(spec.origin).parent


PLOTLY: Final = package("plotly") / "package_data" / "plotly.min.js"
