"""The engine: batches in, findings and a verdict out, one cause for one headline.

    batch ──► producer ──► Described (events) · Ledger → Stream (attempts) · Samples (tensors)
                                  └──────────────── Case ────────────────┘
                                                     │ rules, each Case → findings
                                              precedence ──► findings ──► verdict

Batches may come in any order, in any number of parts and more than once: the findings are those of all of them
in one go. In order, each costs what it brings; a late one lets the attempts of its producer be folded again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from ampwatch.records import Batch

from . import texts
from .backend import backend_limit, device_fault, other_device, saturating, sparse_overflow
from .batches import bad_batch
from .calibration import calibration, growth_probe, spike
from .calls import call_order, scaled_by_hand
from .case import Case
from .described import Described
from .divergence import divergence
from .facts import Stream
from .findings import Finding, Verdict
from .floor import dead_zone, scale_floor
from .forward import forward
from .fused import fused_optimizer
from .gradients import accumulation, cleaned_gradients, clip_scaled, grads_not_cleared, norm_overflow
from .poisoned import poisoned
from .precedence import settle
from .precision import useless_scaler
from .progress import no_updates, rate_of_zero, summed_loss, unscaled_by_new_scale
from .ranks import Agreement, Member
from .rounded import rounded_weights
from .rows import Ledger, Rows
from .samples import Sample, Samples
from .scale_range import underflow
from .scalers import scaler_not_restored, scaler_recreated, scaler_reset
from .schedule import schedule_ahead
from .several import many_optimizers
from .shapes import fits
from .static import (
    closure,
    epsilon_underflow,
    low_precision_params,
    missing_scaler,
    no_gradients,
    on_meta,
    replaced,
    shared_parameter,
    untrained,
)
from .trace import TRACE
from .vanished import always_zero, nothing_but_zeros

Rule = Callable[[Case], Iterator[Finding]]
RunRule = Callable[[Sequence[Sequence[Case]]], Iterator[Finding]]

STREAM_RULES: Final[tuple[Rule, ...]] = (
    clip_scaled,
    grads_not_cleared,
    cleaned_gradients,
    norm_overflow,
    accumulation,
    scaled_by_hand,
    summed_loss,
    unscaled_by_new_scale,
    divergence,
    fused_optimizer,
    poisoned,
    device_fault,
    forward,
    sparse_overflow,
    saturating,
    bad_batch,
    dead_zone,
    scale_floor,
    many_optimizers,
    schedule_ahead,
    no_updates,
    rate_of_zero,
    nothing_but_zeros,
    untrained,
    always_zero,
    underflow,
    growth_probe,
    calibration,
    spike,
)
PRODUCER_RULES: Final[tuple[Rule, ...]] = (  # asked once, about the first stream
    low_precision_params,
    rounded_weights,
    shared_parameter,
    no_gradients,
    on_meta,
    replaced,
    missing_scaler,
    backend_limit,
    other_device,
    epsilon_underflow,
    closure,
    call_order,
    useless_scaler,
    scaler_recreated,
    scaler_reset,
)
RUN_RULES: Final[tuple[RunRule, ...]] = (scaler_not_restored,)  # about all producers of the run

_EXPLAINED: Final = frozenset({"calibration", "growth_probe"})


ENGINE_VERSION: Final = 2
"""One more than that of the engine given out last, where the same records may lead to other findings: a server judges
its stored runs anew then. A test holds it to the sources."""


class Diagnosis:
    """Diagnoses one run as its batches arrive; neither torch nor a disk is touched.

        diagnosis = Diagnosis.from_batches(ampwatch.spool.read(directory))
        for finding in diagnosis.findings(): print(finding.headline)

    Not thread-safe: one caller at a time.

    Arguments:
        window: memory does not grow with the attempts: facts are kept, and the rows of the newest so many (twice as
            many at most), within which they may come in any order; a row that comes later still is left out. None
            keeps them all.
        sample_bytes: nor with the tensors: of each producer's sampled ones so many are kept as fit, see `Samples`.
    """

    def __init__(self, *, window: int | None = None, sample_bytes: int | None = None) -> None:
        self._window, self._sample_bytes = window, sample_bytes
        self._producers: dict[str, _Producer] = {}
        self._agreement = Agreement()
        self._found: list[Finding] | None = None  # None: something came since

    @classmethod
    def from_batches(cls, batches: Iterable[Batch]) -> Diagnosis:
        """A diagnosis of all of these batches, which belong to one run."""
        diagnosis = cls()
        for batch in batches:
            diagnosis.add(batch)
        return diagnosis

    def add(self, batch: Batch) -> None:
        """Take a batch in, in any order; one that was seen already, by (producer, seq), is ignored."""
        if batch.producer not in self._producers:
            whole = batch.run != TRACE  # of a trace a person may have kept each tenth attempt
            samples = Samples(self._sample_bytes)
            made = _Producer(batch.rank, batch.producer, samples, whole=whole, window=self._window)
            self._producers[batch.producer] = made
        if self._producers[batch.producer].add(batch):
            self._found = None

    def findings(self) -> list[Finding]:
        """The findings so far, most severe and most specific first."""
        if self._found is None:
            self._found = self._settled()
        return list(self._found)

    def verdict(self) -> Verdict:
        """One sentence over the run so far, and what could not be judged since it was not recorded."""
        worst = self._worst(self.findings())
        not_judged = " ".join(told for each in self._producers.values() for told in each.judged().not_judged)
        return msgspec.structs.replace(worst, not_judged=not_judged)

    def _settled(self) -> list[Finding]:
        """The findings of each producer, and of all together; only what got something new is judged anew."""
        ordered = sorted(self._producers.values(), key=lambda p: (p.rank, p.name))
        judged = [producer.judged() for producer in ordered]
        found = [finding for each in judged for finding in each.findings]
        runs = [each.cases for each in judged]
        of_run = [finding for rule in RUN_RULES for finding in rule(runs)]
        members = [Member(cases[0], each.ledger) for cases, each in zip(runs, ordered, strict=True)]
        return settle([*found, *of_run, *self._agreement.findings(members)])

    def _worst(self, findings: list[Finding]) -> Verdict:
        worst = next((f for f in findings if f.severity != "info"), None)
        if worst is None:
            return self._unharmed(findings)
        failing = worst.severity in ("fatal", "error") and worst.state != "recovered"
        return Verdict(
            "failing" if failing else "warning",
            worst.severity,
            worst.kind,
            worst.headline,
            worst.first_step,
            worst.module,
            worst.tensor,
        )

    def _unharmed(self, findings: list[Finding]) -> Verdict:
        streams = [stream for each in self._producers.values() for stream in each.judged().streams]
        if not streams:
            return Verdict("no data", None, None, texts.NO_DATA)
        unscaled = all(producer.is_unscaled for producer in self._producers.values())
        sentence = _unscaled(streams) if unscaled else _healthy(streams, findings)
        return Verdict("healthy", "info" if findings else None, None, sentence)


class _Judged(NamedTuple):
    """What is known of one producer by itself.

    Arguments:
        streams: none for a job that ended before its first update().
        cases: one for each stream in order, or one that is empty.
    """

    streams: list[Stream]
    cases: list[Case]
    findings: list[Finding]
    not_judged: list[str]


class _Producer:
    """Everything known of one producer."""

    def __init__(self, rank: int, name: str, samples: Samples, *, whole: bool, window: int | None) -> None:
        self.rank = rank
        self.name = name
        self._window = window
        self._seen = _Seen()
        self._described = Described()
        self.ledger = Ledger(whole=whole)
        self._samples = samples
        self._streams: dict[int, Stream] = {}
        self._base: dict[int, Stream] = {}  # of the rows that the ledger has forgotten, to begin again from
        self._judged: _Judged | None = None  # None: something came since

    def add(self, batch: Batch) -> bool:
        """Take a batch in; False where it was there already."""
        if not self._seen.add(batch.seq):
            return False
        self._judged = None
        if batch.kind == "events":
            self._described.add(filter(fits, batch.events()))
        elif batch.kind == "attempts":
            self.ledger.add(batch.table())
            if self._window is not None and self.ledger.waiting >= self._window:
                self._fold()
        else:
            self._samples.add(batch.table())
        return True

    def judged(self) -> _Judged:
        """The producer by itself; costs nothing where nothing new came."""
        if self._judged is None:
            streams = self._fold()
            cases = list(self._cases(streams))
            findings = [f for case in cases for f in _by_rules(case, first=case is cases[0])]
            self._judged = _Judged(list(streams.values()), cases, findings, list(self._not_judged()))
        return self._judged

    @property
    def is_unscaled(self) -> bool:
        """Whether no loss scaler stands beside what was watched."""
        return self._described.is_unscaled

    def _not_judged(self) -> Iterator[str]:
        """What was lost, and what cannot be said for it."""
        if self.ledger.missing:
            first = self.ledger.first_missing
            at = texts.at_step(self._step_of(first), first)
            yield texts.LOST["attempts"].format(attempts=texts.times(self.ledger.missing), first=at)
        kinds = {event.data.get("kind") for event in self._described.dropped.events}
        yield from (texts.LOST[kind] for kind in ("tensors", "events") if kind in kinds)

    def _fold(self) -> dict[int, Stream]:
        """The facts of each stream, up to date."""
        rows, again = self.ledger.take()
        stale = any(not self._is_current(i, s) for i, s in self._streams.items() if i not in self._base)
        if again or stale:
            rows, self._streams = self.ledger.all(), copy.deepcopy(self._base)
        self._fold_into(self._streams, rows)
        if self._window is not None:
            self._forget(self.ledger.last - self._window, self._window)
        return self._streams

    def _forget(self, upto: int, at_least: int) -> None:
        """Keep of the rows up to an attempt only the facts, if they are that many."""
        if upto - self.ledger.forgotten >= at_least:
            self._fold_into(self._base, self.ledger.between(self.ledger.forgotten, upto))
            self.ledger.forget(upto)

    def _fold_into(self, streams: dict[int, Stream], rows: Rows) -> None:
        indices = np.unique(rows["stream"]).tolist()
        for index in indices:
            if index not in streams:
                streams[index] = Stream(self._described.interval(index), self._described.hysteresis(index))
            # mostly there is one stream: no copy
            streams[index].fold(rows if len(indices) == 1 else rows[rows["stream"] == index])

    def _is_current(self, index: int, stream: Stream) -> bool:
        known = self._described.interval(index), self._described.hysteresis(index)
        return known == (stream.interval, stream.hysteresis)

    def _cases(self, found: dict[int, Stream]) -> Iterator[Case]:
        """A case for each stream, in order; an empty one for a job that ended before its first update()."""
        streams = found or {0: Stream()}
        sampled = list(self._samples)
        for index, stream in sorted(streams.items()):
            yield Case(
                self.rank,
                self.name,
                index,
                stream,
                self._described,
                _of_stream(sampled, index),
                self._step_of,
                streams,
            )

    def _step_of(self, attempt: int) -> int:
        return self.ledger.step_of(attempt)


class _Seen:
    """Sequence numbers seen: all below a mark, and those above it."""

    def __init__(self) -> None:
        self._below = 0
        self._above: set[int] = set()

    def add(self, seq: int) -> bool:
        """Note a number; False if it was there already."""
        if seq < self._below or seq in self._above:
            return False
        self._above.add(seq)
        while self._below in self._above:
            self._above.remove(self._below)
            self._below += 1
        return True


def _by_rules(case: Case, *, first: bool) -> Iterator[Finding]:
    rules = (*PRODUCER_RULES, *STREAM_RULES) if first else STREAM_RULES
    for rule in rules:
        yield from rule(case)


def _of_stream(samples: Iterable[Sample], index: int) -> list[Sample]:
    chosen = ((s, s.tensors["stream"] == index) for s in samples)
    # Mostly there is one stream: no copy, as it is all that was sampled.
    return [s if its.all() else Sample(s.attempt, s.tensors[its]) for s, its in chosen if its.any()]


def _unscaled(streams: list[Stream]) -> str:
    return texts.HEALTHY_UNSCALED.format(taken=sum(s.taken for s in streams))


def _healthy(streams: list[Stream], findings: list[Finding]) -> str:
    skipped = sum(s.skips for s in streams)
    explained = skipped and any(f.kind in _EXPLAINED for f in findings)
    newest = max(streams, key=lambda s: s.last.attempt)
    return texts.HEALTHY.format(
        taken=sum(s.taken for s in streams),
        skipped=skipped,
        why=" (ordinary for loss scaling)" if explained else "",
        scale=texts.power(newest.scale),
    )
