"""What the job's own log is told: each fatal finding once, at once, and three lines at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .guard import Report, guard
from .records import Batch, Table

if TYPE_CHECKING:
    from .diagnosis.engine import Diagnosis
    from .diagnosis.findings import Finding, Verdict


class JobLog:
    """Feeds a `Diagnosis` with the run's batches and says on stderr what comes of it.

    A diagnosis that fails is given up, and recording goes on.

    Arguments:
        speaks: whether anything is said; of several ranks one is enough.
        where: the third line of the verdict, where the run can be seen.
        listeners: called once with each fatal finding, whether it speaks or not.
    """

    def __init__(
        self, speaks: bool, where: str, listeners: Sequence[Callable[[Finding], object]] = ()
    ) -> None:
        self._speaks, self._where, self._listeners = speaks, where, listeners
        self._diagnosis: Diagnosis | None = None
        self._failed = False
        self._told: set[str] = set()
        self._first_scale: float | None = None
        self._last_scale = 0.0
        self.counts = {"attempts": 0, "taken": 0, "skipped": 0}

    def count(self, table: Table | None) -> None:
        """Count the attempts of a table, the taken and the skipped ones; note the first and the last scale."""
        if not table or not len(table["attempt"]):
            return
        rows = len(table["attempt"])
        skipped = _integers(table, "found_inf", rows) != 0
        taken = _integers(table, "stepped", rows) & ~_integers(table, "skipped", rows) != 0
        self.counts["attempts"] += rows
        self.counts["taken"] += int(taken.sum())
        self.counts["skipped"] += int(skipped.sum())
        if self._first_scale is None:
            self._first_scale = float(table["scale"][0])
        self._last_scale = float(table.get("scale_after", table["scale"])[-1])

    def add(self, batches: Sequence[Batch], report: Report, *, say: bool) -> None:
        """Diagnose the batches too; tell of fatal findings that are new, in the log only if `say`."""
        if self._failed:
            return
        self._failed = True  # until it is known that it went well
        with guard("recorder.diagnosis", report):
            for finding in self._fatal(batches):
                if say and self._speaks:
                    _say(f"fatal: {finding.headline}")
                for listener in self._listeners:
                    with guard("recorder.on_finding", report):
                        listener(finding)
            self._failed = False

    def say_verdict(self) -> None:
        """Three lines: the verdict; what to do, or the counts; where the run can be seen."""
        if self._speaks and self.counts["attempts"]:
            _say(*self._lines())

    def _fatal(self, batches: Sequence[Batch]) -> list[Finding]:
        if self._diagnosis is None:
            from .diagnosis.engine import Diagnosis

            self._diagnosis = Diagnosis()
        for batch in batches:
            self._diagnosis.add(batch)
        new = [f for f in self._diagnosis.findings() if f.severity == "fatal" and f.key not in self._told]
        self._told |= {finding.key for finding in new}
        return new

    def _lines(self) -> tuple[str, str, str]:
        if self._diagnosis is None or self._failed:
            return "recorded; the diagnosis itself failed", self._summary(), self._where
        verdict = self._diagnosis.verdict()
        return (
            f"{verdict.word}: {after_word(verdict)}",
            self._advice(verdict.kind) or self._summary(),
            self._where,
        )

    def _advice(self, kind: str | None) -> str:
        assert self._diagnosis is not None
        for finding in self._diagnosis.findings():
            if finding.kind == kind and finding.severity != "info":
                texts = [advice.text for advice in finding.advice] or [fact.text for fact in finding.evidence]
                return texts[0] if texts else ""
        return ""

    def _summary(self) -> str:
        counts = "{attempts:,} attempts, {taken:,} taken, {skipped:,} skipped".format(**self.counts)
        return f"{counts}, scale {self._first_scale:g} → {self._last_scale:g}"


def after_word(verdict: Verdict) -> str:
    """The sentence of a verdict without its word, where it begins with it: for a line that says the word itself."""
    word = f"{verdict.word}: "
    return verdict.sentence[len(word) :] if verdict.sentence.lower().startswith(word) else verdict.sentence


def _integers(table: Table, name: str, rows: int) -> npt.NDArray[np.int64]:
    return np.asarray(table.get(name, np.zeros(rows)), dtype=np.int64)


def _say(*lines: str) -> None:
    """Lines on stderr, written at once so that other ranks' output does not come between them."""
    sys.stderr.write("".join(f"ampwatch: {line}\n" for line in lines))
    sys.stderr.flush()
