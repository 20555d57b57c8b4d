"""Diagnosis: records in, findings out. Torch-free, incremental, and the same answer whatever order batches come in."""

from __future__ import annotations

from pathlib import Path

from .engine import Diagnosis
from .findings import Advice, Evidence, Finding, Verdict

__all__ = ["Advice", "Diagnosis", "Evidence", "Finding", "Verdict", "diagnose", "diagnose_run"]


def diagnose(path: str | Path) -> list[Finding]:
    """The findings of a recorded run, most severe and most specific first.

    Arguments:
        path: the folder of one run, `ampwatch_runs/<run>`, or of one producer in it.

    Errors: RunNotFound where no run is recorded there. Does not synchronise with any device.
    """
    return diagnose_run(path).findings()


def diagnose_run(path: str | Path) -> Diagnosis:
    """The diagnosis of a recorded run, for its verdict as well as its findings; arguments as `diagnose`."""
    from ampwatch import spool

    return Diagnosis.from_batches(spool.read(path))
