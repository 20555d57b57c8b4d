"""What the device or the backend does: a scaler that is off, attempts that are hidden, float16 that saturates or is broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ampwatch.records import Event
from ampwatch.stats.layout import FLOAT16_MAX

from . import texts
from .case import Case
from .findings import Evidence, Finding
from .gradients import hooks_on
from .moments import Moment
from .samples import Sample
from .static import is_off

SATURATED: Final = 5  # attempts
UNSCALED: Final = 10  # attempts without a scale() that was seen


def backend_limit(case: Case) -> Iterator[Finding]:
    """A scaler that is off, or attempts that cannot be seen; asked once of a producer."""
    yield from _turned_off(case)
    captured = case.described.captured.events
    if captured:
        yield _hidden(case, "captured", _moment(case, captured[0]))
        return
    unscaled = case.stream.habits.unscaled
    never = unscaled.first == case.stream.first  # else it is the loop that leaves scale() out
    if unscaled.first and never and unscaled.count >= UNSCALED and not is_off(case):
        yield _hidden(case, "compiled", unscaled.first)


def _turned_off(case: Case) -> Iterator[Finding]:
    """A scaler that was asked for and is off, because the machine has no such device."""
    for scaler in case.described.scalers.values():
        if scaler.get("asked") and scaler.get("enabled") is False:
            device = scaler.get("device", "cuda")
            text = f"GradScaler({device!r}) was made with enabled=True, and torch turned it off."
            yield case.finding(
                "backend_limit",
                "warning",
                texts.HEADLINES["backend_limit.off"].format(device=device),
                first=Moment(0, 0),
                evidence=[Evidence(text=text, attempt=0)],
                advice=texts.ADVICE["backend_limit.off"],
                confidence=1.0,
            )


def other_device(case: Case) -> Iterator[Finding]:
    """A scaler that was made for another device than that of the parameters, and is on: it works, by the loss's device."""
    scaler: dict[str, Any] = next((s for s in case.described.scalers.values() if s.get("enabled")), {})
    device = scaler.get("device")
    for check in case.described.checks.events[:1]:
        devices = check.data.get("devices") or [device]
        if device in (None, *devices) or "meta" in devices or scaler.get("class") == "ShardedGradScaler":
            continue
        text = f"GradScaler({device!r}) beside parameters on {', '.join(devices)}."
        yield case.finding(
            "backend_limit",
            "info",
            texts.HEADLINES["backend_limit.device"].format(
                device=device, optimizer=check.data["class"], other=", ".join(devices)
            ),
            first=Moment(0, 0),
            evidence=[Evidence(text=text, attempt=0)],
            advice=texts.ADVICE["backend_limit.off"][:1],
            confidence=1.0,
            state="explained",
        )


def saturating(case: Case) -> Iterator[Finding]:
    """The largest gradient is 65504 to the bit and never inf, and no hook of the loop's own may have made it so."""
    seen = case.stream.habits.at_limit
    if case.stream.habits.infinite.count or hooks_on(case):
        return
    if seen.first is not None and seen.count >= SATURATED:
        yield _saturating(case, seen.first, seen.count, "The largest gradient")
        return
    for tensor, attempts in _pinned(case.samples).items():
        if len(attempts) >= SATURATED:
            first, name = Moment(attempts[0], case.step_of(attempts[0])), case.described.name_of(tensor)
            yield _saturating(case, first, len(attempts), f"The largest gradient of {name}", name)
            return


def _pinned(samples: Sequence[Sample]) -> dict[int, list[int]]:
    """Sampled attempts in which a tensor's largest gradient is the largest number of float16, by tensor."""
    at: dict[int, list[int]] = {}
    for sample in samples:
        for tensor in sample.tensors["tensor"][sample.tensors["max_abs"] == FLOAT16_MAX].tolist():
            at.setdefault(tensor, []).append(sample.attempt)
    return at


def _saturating(case: Case, first: Moment, count: int, what: str, tensor: str = "") -> Finding:
    text = f"{what} is exactly 65504 in {texts.times(count)}, and no gradient was ever inf or NaN."
    return case.finding(
        "backend_limit",
        "warning",
        texts.HEADLINES["backend_limit.saturating"].format(first=texts.at(first)),
        first=first,
        evidence=[Evidence(text=text, value=FLOAT16_MAX, attempt=first.attempt, tensor=tensor)],
        advice=texts.ADVICE["backend_limit.saturating"],
        confidence=0.7,
        tensor=tensor,
    )


def device_fault(case: Case) -> Iterator[Finding]:
    """A layer that gives NaN throughout in float16, of inputs and weights whose float32 result fits it well."""
    broken = case.stream.all_episodes()[0] if case.stream.all_episodes() else None
    if broken is None or case.stream.taken or broken.first_nonfinite is None:
        return
    for check in case.described.float32_checks.events:
        if _proves_fault(check):
            yield _device_fault(case, check, broken.first_nonfinite)
            return


def sparse_overflow(case: Case) -> Iterator[Finding]:
    """Values of a sparse float16 gradient that overflow only as those of equal indices are added."""
    events = [e for e in case.described.sparse_overflows.events if max(e.stream, 0) == case.index]
    if not events:
        return
    first, name = _moment(case, events[0]), case.described.name_of((events[0].data.get("tensors") or [-1])[0])
    count = sum(event.repeat for event in events)
    text = f"In {texts.times(count)} every value of {name} was finite, and their sums by index were not."
    yield case.finding(
        "sparse_overflow",
        "warning",
        texts.HEADLINES["sparse_overflow"].format(first=texts.at(first), tensor=name),
        first=first,
        last=_moment(case, events[-1]),
        evidence=[Evidence(text=text, value=count, unit="attempts", attempt=first.attempt, tensor=name)],
        advice=texts.ADVICE["sparse_overflow"],
        tensor=name,
    )


def _proves_fault(check: Event) -> bool:
    data = check.data
    largest = [data.get(key, float("inf")) for key in ("float32_max_abs", "input_max_abs", "weight_max_abs")]
    return (
        bool(data.get("output_numel", 0) == data.get("output_n_nan", 0) > 0)
        and max(largest) < FLOAT16_MAX / 2
    )


def _device_fault(case: Case, check: Event, first: Moment) -> Finding:
    module, data = str(check.data.get("module")), check.data
    name = texts.module(module)
    text = (
        f"Computed once more in float32, {name} gives finite numbers, the largest {data['float32_max_abs']:.4g}; its inputs "
        f"reach {data['input_max_abs']:.4g}, its weights {data['weight_max_abs']:.4g}: all well within float16."
    )
    made = f"In float16 all of its {data['output_numel']:.0f} outputs are NaN."
    return case.finding(
        "device_fault",
        "fatal",
        texts.HEADLINES["device_fault"].format(first=texts.at(first), module=name),
        first=first,
        evidence=[
            Evidence(text=text, value=data["float32_max_abs"], attempt=check.attempt, tensor=name),
            Evidence(
                text=made, value=data["output_n_nan"], unit="elements", attempt=check.attempt, tensor=name
            ),
        ],
        advice=texts.fill(texts.ADVICE["device_fault"], module=name),
        confidence=0.9,
        module=module,
    )


def _hidden(case: Case, how: str, first: Moment) -> Finding:
    return case.finding(
        "backend_limit",
        "warning",
        texts.HEADLINES[f"backend_limit.{how}"].format(first=texts.at(first)),
        first=first,
        evidence=[Evidence(text=texts.HIDDEN[how], attempt=first.attempt)],
        advice=texts.ADVICE["backend_limit.hidden"],
        confidence=0.9,
    )


def _moment(case: Case, event: Event) -> Moment:
    attempt = max(event.attempt, 0)
    return Moment(attempt, case.step_of(attempt))
