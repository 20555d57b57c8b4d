"""Gradients that are there and exactly zero: of all tensors, or always of the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .moments import Moment
from .scale_range import may_underflow
from .zeros import Zeros

LASTING: Final = 20  # attempts in a row
SETTLED: Final = 8  # attempts after the first step, until what starts at zero has moved
ALWAYS: Final = 50  # attempts over which a tensor was looked at …
LOOKS: Final = 16  # … and how often


def nothing_but_zeros(case: Case) -> Iterator[Finding]:
    """Every gradient of the newest attempts is exactly zero: a fault, unless the loss may be zero and once was not."""
    zeros = case.stream.zeros
    if zeros.since is None or zeros.attempts < LASTING:
        return
    if not zeros.losses and may_underflow(case):
        return  # which is said of them
    kept = zeros.others < zeros.attempts and _learns(case)
    key = "no_updates.kept" if kept else "no_updates.zero"
    text = f"All gradient elements of {texts.times(zeros.attempts)} in a row are exactly zero."
    yield case.finding(
        "no_updates",
        "info" if kept else "error",
        texts.HEADLINES[key].format(
            first=texts.at(zeros.since), attempts=texts.times(zeros.attempts), loss=_loss(zeros)
        ),
        first=zeros.since,
        evidence=[
            Evidence(text=text, value=zeros.attempts, unit="attempts", attempt=zeros.since.attempt),
            *_in_float16(case),
        ],
        advice=[] if kept else texts.ADVICE["no_updates.zero"],
        confidence=0.9,
    )


def always_zero(case: Case) -> Iterator[Finding]:
    """Tensors whose gradient is zero throughout whenever it was looked at, while others' are not."""
    taken = case.stream.first_taken
    if taken is None or may_underflow(case):
        return
    samples = [s for s in case.samples if s.attempt > taken.attempt + SETTLED]
    seen = (
        np.concatenate([s.tensors[["tensor", "numel", "n_zero", "n_bad"]] for s in samples])
        if samples
        else None
    )
    if seen is None or samples[-1].attempt - samples[0].attempt < ALWAYS:
        return
    seen = seen[(seen["numel"] > 0) & (seen["n_bad"] == 0)]
    is_zero = seen["n_zero"] == seen["numel"]
    ids, looks = np.unique(seen["tensor"], return_counts=True)
    others = set(seen["tensor"][~is_zero].tolist())
    often = [i for i, n in zip(ids.tolist(), looks.tolist(), strict=True) if n >= LOOKS and i not in others]
    found = [i for i in often if _is_of_layer(case, i)]
    if found and others:
        yield _always_zero(case, found, samples[0].attempt, taken.attempt + SETTLED + 1)


def _is_of_layer(case: Case, tensor: int) -> bool:
    """No bias, which may cancel out: in a difference of two outputs it is exactly zero."""
    return len(case.described.tensors.get(tensor, {}).get("shape") or ()) > 1


def _always_zero(case: Case, tensors: list[int], looked: int, since: int) -> Finding:
    names = [case.described.name_of(tensor) for tensor in tensors]
    first = Moment(since, case.step_of(since))
    looked_at = texts.at_step(case.step_of(looked), looked)
    text = f"Zero in every attempt that was looked at, from {looked_at} on: {', '.join(names[:8])}."
    return case.finding(
        "no_gradients",
        "info",
        texts.HEADLINES["no_gradients.zero"].format(
            count=texts.times(len(names), "tensor"),
            tensor=texts.first_of(names[0], len(names)),
            first=looked_at,
        ),
        first=first,
        evidence=[Evidence(text=text, value=len(names), unit="tensors", tensor=names[0])],
        advice=texts.ADVICE["no_gradients.zero"],
        confidence=0.8,
        tensor=names[0],
    )


def _loss(zeros: Zeros) -> str:
    if zeros.losses == zeros.attempts:
        return ", and so is the loss"
    return ", although the loss is not" if zeros.others == zeros.attempts else ""


def _learns(case: Case) -> bool:
    """Whether anything was learned: by a stream of this job, or by the one that it resumes."""
    met = {check.data.get("id"): check for check in reversed(case.described.checks.events)}
    resumed = any(check.data.get("steps_before") for check in met.values())
    return resumed or case.stream.zeros.learned or any(s.zeros.learned for s in case.streams.values())


def _in_float16(case: Case) -> list[Evidence]:
    dtypes = list(case.described.loss_dtypes.values())
    if dtypes != ["float16"]:
        return []
    return [Evidence(text="The loss at scale() is float16, in which every number up to 3e-8 is 0.")]
