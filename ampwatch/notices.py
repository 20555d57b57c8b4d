"""Warnings about the recording itself, by the logger `ampwatch`."""

from __future__ import annotations

import logging

_log = logging.getLogger("ampwatch")


def warn(message: str, *values: object) -> None:
    """Log a warning that names its author: without a handler Python prints the bare message into the job's output."""
    _log.warning(f"ampwatch: {message}", *values)
