"""Weights of low precision that no step moves: what is added to them is rounded away."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ampwatch.records import Event

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .moments import Moment

LOOKS: Final = 3
STEPS: Final = 5  # taken
RISING: Final = 1.01  # a learning rate that warms up still


def rounded_weights(case: Case) -> Iterator[Finding]:
    """Optimizers whose weights in float16 or bfloat16 are what they were at their first step, to the bit."""
    for event in rounded(case):
        data = event.data
        names = [case.described.name_of(tensor) for tensor in data["tensors"]]
        dtype = case.described.tensors.get(data["tensors"][0], {}).get("dtype", "low precision")
        first = Moment(data["since"], case.step_of(data["since"]))
        text = (
            f"After {texts.times(data['steps'], 'step')} at a learning rate of {data['lr']:.3g}, "
            f"0 of {data['compared']} weights have changed, of which {data['with_gradient']} have a gradient: {', '.join(names)}."
        )
        yield case.finding(
            "low_precision_params",
            "error",
            texts.HEADLINES["low_precision_params.rounded"].format(
                first=texts.at(first),
                tensor=names[0],
                dtype=dtype,
                optimizer=case.described.optimizer_name(data["optimizer"]),
            ),
            first=first,
            evidence=[Evidence(text=text, value=0, unit="weights", attempt=event.attempt, tensor=names[0])],
            advice=texts.fill(texts.ADVICE["low_precision_params.rounded"], dtype=dtype),
            confidence=0.9,
            tensor=names[0],
        )


def rounded(case: Case) -> Iterator[Event]:
    """Of each such optimizer the newest look at its weights."""
    looks: dict[int, list[Event]] = {}
    for event in case.described.weights.events:
        looks.setdefault(event.data["optimizer"], []).append(event)
    yield from (seen[-1] for optimizer, seen in looks.items() if _none_moves(case, optimizer, seen))


def _none_moves(case: Case, optimizer: int, seen: list[Event]) -> bool:
    """In no look, the last ones with gradients, at a rate that does not rise, and with steps that were taken."""
    last = [event.data for event in seen[-LOOKS:]]
    if len(last) < LOOKS or not last[-1]["tensors"] or any(event.data["moved"] for event in seen):
        return False
    steps = last[-1]["steps"] - _skips(case, optimizer)
    rising = last[-1]["lr"] > RISING * last[0]["lr"]
    return steps >= STEPS and not rising and all(each["with_gradient"] for each in last)


def _skips(case: Case, optimizer: int) -> int:
    """Attempts in which it may have been skipped."""
    told = case.described.streams
    return sum(s.skips for i, s in case.streams.items() if optimizer in told.get(i, {}).get("optimizers", ()))
