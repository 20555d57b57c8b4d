"""Diagnosis: records in, findings out. Torch-free, incremental, and the same answer whatever order batches come in."""

from __future__ import annotations

from pathlib import Path

from .engine import Diagnosis
from .findings import Advice, Evidence, Finding, Verdict
from .trace import Trace, read_trace

__all__ = [
    "Advice",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Trace",
    "Verdict",
    "diagnose",
    "diagnose_run",
    "read_trace",
]


def diagnose(path: str | Path, policy: str = "torch") -> list[Finding]:
    """The findings of a recorded run, most severe and most specific first.

    Arguments:
        path: the folder of one run, `ampwatch_runs/<run>`, or of one producer in it; or a trace, see `read_trace`.
        policy: of the scaler that a trace is of, a key of `trace.POLICIES`.

    Errors: RunNotFound where nothing is recorded there; InvalidBatch for a trace that cannot be read. Does not
    synchronise with any device.
    """
    return diagnose_run(path, policy).findings()


def diagnose_run(path: str | Path, policy: str = "torch") -> Diagnosis:
    """The diagnosis of a recorded run, for its verdict as well as its findings; arguments as `diagnose`."""
    from ampwatch import spool

    if Path(path).is_file():
        return Diagnosis.from_batches(read_trace(path, policy).batches)
    return Diagnosis.from_batches(spool.read(path))
