"""What the job's own log is told: each fatal finding once, at once, and three lines at the end.

ampwatch: failing: Values inside blocks.1.attention exceed float16 (65504) in the forward pass since step 412. …
ampwatch: to do: Compute what overflows in blocks.1.attention in float32. …
ampwatch: evidence, and code to paste: ampwatch diagnose ampwatch_runs/01M8M6E7S4QJWD11WQEJS8BJ8M
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from .guard import Report, guard
from .records import Batch, Table

if TYPE_CHECKING:
    from .diagnosis.findings import Finding, Verdict

PREFIX: Final = "ampwatch: "
SHARE: Final = 0.001  # of one core, for judging while all goes well
SHARE_IN_TROUBLE: Final = 0.025  # and while steps are skipped, or losses are not finite
WINDOW: Final = (
    1024  # attempts whose rows the diagnosis in the job holds: sources of one flush are further apart by few
)
SAMPLE_BYTES: Final = (
    6 << 20
)  # of the statistics that it holds: of 300 tensors 32 newest attempts, of 1,000 8
UNREAD_BYTES: Final = 1 << 20  # of batches that wait for the diagnosis
_NO_BREAK: Final = "\u00a0"  # a space inside a command, which is copied whole
_COLOURS: Final = {"healthy": 32, "warning": 33, "failing": 31, "fatal": 31}  # green, yellow, red


class Place(NamedTuple):
    """Where the run can be seen at its end.

    `directory` is None where nothing of it was written; `part` says what was, where that is not all of it. `unsent_to`
    names a server that lacks some of it.
    """

    url: str
    unsent_to: str
    directory: Path | None
    run: str
    part: str = ""

    def line(self, what: str, command: str) -> str:
        """A line that leads there.

        Arguments:
            what: what is to be had there.
            command: `serve` or `diagnose`, for a run that is only on the disk.
        """
        if self.url:
            return f"{what}: {self.url}"
        unsent = f"not all of it has reached {self.unsent_to}; " if self.unsent_to else ""
        if self.directory is None:
            return f"{unsent}nothing of it is kept on this machine"
        where = self.directory / self.run if command == "diagnose" else self.directory
        part = f", {self.part}" if self.part else ""
        return f"{unsent}{what}{part}: " + f"ampwatch {command} {where}".replace(" ", _NO_BREAK)


class JobLog:
    """Feeds a `Diagnosis` with the run's batches and says on stderr what comes of it.

    Judging costs CPU time that training may want, and that grows with the model: it waits until what it took last
    time is `SHARE` of the time since, or `SHARE_IN_TROUBLE` where that is. So do the batches, which are read one after
    another then. Without anybody to tell, nothing is diagnosed. A diagnosis that fails is given up, and recording goes on.

    Arguments:
        speaks: whether anything is said; of several ranks one is enough.
        listeners: called once with each fatal finding, whether it speaks or not.
    """

    def __init__(self, speaks: bool, listeners: Sequence[Callable[[Finding], object]] = ()) -> None:
        # Here, on the thread that makes it: a fork while the recorder's own imports would leave the child half a module.
        from .diagnosis.engine import Diagnosis

        self._speaks, self._listeners = speaks, listeners
        self._diagnosis = Diagnosis(window=WINDOW, sample_bytes=SAMPLE_BYTES)
        self._unread: list[Batch] = []
        self._failed = False
        self._is_in_trouble = False  # since it was last judged
        self._judged, self._took = -math.inf, 0.0  # when, on the monotonic clock, and the CPU seconds of it
        self._told: set[str] = set()
        self._losses = _Ends()
        self._times = _Ends()
        self.counts = {"attempts": 0, "taken": 0, "skipped": 0}

    def count(self, table: Table | None) -> None:
        """Count the attempts of a table, the taken and the skipped ones; note how loss and time go on."""
        if not table or not len(table["attempt"]):
            return
        rows = len(table["attempt"])
        skipped = _integers(table, "found_inf", rows) != 0
        taken = _integers(table, "stepped", rows) & ~_integers(table, "skipped", rows) != 0
        self.counts["attempts"] += rows
        self.counts["taken"] += int(taken.sum())
        self.counts["skipped"] += int(skipped.sum())
        self._is_in_trouble |= bool(skipped.any()) or _has_broken_loss(table)
        self._losses.add(table.get("loss"))
        self._times.add(table.get("time"))

    def add(self, batches: Sequence[Batch], report: Report) -> None:
        """Take in what was recorded since; it is read when it is judged, or as it grows large.

        Arguments:
            report: told where something of this fails.
        """
        with self._given_up_if_it_fails(report) as is_wanted:
            if is_wanted:
                self._unread += batches
                if sum(len(batch.body) for batch in self._unread) > UNREAD_BYTES:
                    self._read()

    def judge(self, report: Report, *, final: bool) -> None:
        """Where it is time, tell of fatal findings that are new.

        Arguments:
            report: told where something of this fails.
            final: nothing follows, so it is time; the log hears of it by `say_verdict`.
        """
        with self._given_up_if_it_fails(report) as is_wanted:
            for finding in self._fatal() if is_wanted and (final or self._is_time()) else ():
                if self._speaks and not final:
                    _say("fatal", finding.headline)
                for listener in self._listeners:
                    with guard("recorder.on_finding", report):
                        listener(finding)

    def say_verdict(self, place: Place) -> bool:
        """Three lines: the verdict; what to do, or how it went; where the run can be seen. False if nothing is said.

        Without a finished attempt only what is wrong is said: torch may have ended the job in the first one.
        """
        if not (self._speaks and (self.counts["attempts"] or self._is_wrong())):
            return False
        _say(*self._lines(place))
        return True

    def _is_wrong(self) -> bool:
        return not self._failed and self._diagnosis.verdict().kind is not None

    @contextmanager
    def _given_up_if_it_fails(self, report: Report) -> Iterator[bool]:
        """Under the guard; answers whether there is anything to do: somebody to tell, and no failure before."""
        is_wanted = not self._failed and bool(self._speaks or self._listeners)
        self._failed = self._failed or is_wanted  # until it is known that it went well
        with guard("recorder.diagnosis", report):
            yield is_wanted
            self._failed = self._failed and not is_wanted

    def _fatal(self) -> list[Finding]:
        new = [f for f in self._findings() if f.severity == "fatal" and f.key not in self._told]
        self._told |= {finding.key for finding in new}
        return new

    def _is_time(self) -> bool:
        share = SHARE_IN_TROUBLE if self._is_in_trouble else SHARE
        return time.monotonic() - self._judged >= self._took / share

    def _findings(self) -> list[Finding]:
        began, is_first = time.thread_time(), self._judged == -math.inf
        self._read()
        found = self._diagnosis.findings()
        self._took = 0.0 if is_first else time.thread_time() - began  # the first imports, and makes tables
        self._judged, self._is_in_trouble = time.monotonic(), False
        return found

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for batch in unread:
            self._diagnosis.add(batch)

    def _lines(self, place: Place) -> tuple[str, str, str, str]:
        """The word of the verdict, and the three lines."""
        if self._failed:
            counts = "{attempts:,} attempts, {taken:,} taken, {skipped:,} skipped".format(**self.counts)
            return (
                "recorded",
                f"{counts}; the diagnosis failed",
                self._course(),
                place.line("to see it", "serve"),
            )
        verdict = self._diagnosis.verdict()
        advice = self._advice(verdict.kind)
        if not advice:
            return verdict.word, after_word(verdict), self._course(), place.line("to see it", "serve")
        leads = place.line("evidence, and code to paste", "diagnose")
        return verdict.word, after_word(verdict), f"to do: {advice}", leads

    def _advice(self, kind: str | None) -> str:
        for finding in self._diagnosis.findings():
            if finding.kind == kind and finding.severity != "info" and finding.advice:
                return finding.advice[0].text
        return ""

    def _course(self) -> str:
        """How it went: loss, duration, time a step."""
        attempts = self.counts["attempts"]
        course = f"{attempts:,} attempt{'' if attempts == 1 else 's'}"
        if self._losses.count > 1:
            course = f"loss {self._losses.first:.4g} → {self._losses.last:.4g}"
        took = self._times.last - self._times.first
        if took > 0:
            course += f" in {_duration(took)}, {_short(took / (self._times.count - 1))} a step"
        return course


class _Ends:
    """The first and the last finite value of a column, and how many there are."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self.last = 0.0

    def add(self, column: npt.ArrayLike | None) -> None:
        values = np.asarray([] if column is None else column, dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            self.first = self.first if self.count else float(values[0])
            self.last = float(values[-1])
            self.count += len(values)


def after_word(verdict: Verdict) -> str:
    """The sentence of a verdict without its word, where it begins with it: for a line that says the word itself."""
    word = f"{verdict.word}: "
    return verdict.sentence[len(word) :] if verdict.sentence.lower().startswith(word) else verdict.sentence


def _has_broken_loss(table: Table) -> bool:
    from .diagnosis.rows import are_nonfinite  # with the engine, by `JobLog`

    return "loss" in table and bool(are_nonfinite(np.asarray(table["loss"], dtype=np.float64)).any())


def _integers(table: Table, name: str, rows: int) -> npt.NDArray[np.int64]:
    return np.asarray(table.get(name, np.zeros(rows)), dtype=np.int64)


def _duration(seconds: float) -> str:
    """`12 s`, `1 min 12 s`, `3 h 5 min`, `2 d 3 h`."""
    whole = round(seconds)
    for large, unit, small, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {part}"
    return _short(seconds)


def _short(seconds: float) -> str:
    """`11 ms`, `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _say(word: str, first: str, *others: str) -> None:
    """Lines on stderr, the first after a word, written at once so that other ranks' output does not come between them.

    In a terminal they are broken between words and the word is coloured; in a file each stays one line.
    """
    lines = [f"{PREFIX}{word}: {first}", *(PREFIX + line for line in others)]
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = [_broken(line, width) for line in lines]
        if "NO_COLOR" not in os.environ and word in _COLOURS:
            lines[0] = lines[0].replace(word, f"\x1b[{_COLOURS[word]}m{word}\x1b[0m", 1)
    sys.stderr.write("".join(f"{line}\n" for line in lines).replace(_NO_BREAK, " "))
    sys.stderr.flush()


def _broken(line: str, width: int) -> str:
    """A line broken between words; an address or a command stays whole."""
    indent = " " * len(PREFIX)
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
