"""What needs no training to be seen: dtypes, parameters that are shared, foreign or frozen, a scaler that is off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from ampwatch.records import Event

from . import texts
from .case import Case
from .described import Described
from .findings import Evidence, Finding, Severity
from .moments import Moment
from .rounded import rounded

NEVER_IN: Final = 50  # attempts without a gradient
FLOAT16_EPS: Final = 6e-8  # the smallest float16 number is 5.96e-8; below half of it an eps becomes 0


def low_precision_params(case: Case) -> Iterator[Finding]:
    """Trainable float16, bfloat16 or complex parameters given to a scaler that is on."""
    still = {event.data["optimizer"] for event in rounded(case)}
    for check in _latest(case):
        low = check.data.get("low") or {}
        if not low or not _scaled(case, check) or check.data.get("id") in still:
            continue
        raised = [dtype for dtype in low if _is_refused(case, dtype, check.data)]
        dtype = next(iter(raised or low))
        severity: Severity = "error" if raised else "warning"
        first = _moment(case, check)
        headline = texts.HEADLINES[f"low_precision_params.{severity}"].format(
            first=texts.at(first), optimizer=check.data["class"], dtype=dtype
        )
        yield case.finding(
            "low_precision_params",
            severity,
            headline,
            first=first,
            evidence=[_named(d, names) for d, names in low.items()],
            advice=texts.fill(texts.ADVICE["low_precision_params"], dtype=dtype),
            confidence=1.0,
            tensor=low[dtype][0],
        )


def shared_parameter(case: Case) -> Iterator[Finding]:
    """Parameters that two optimizers of a scaler hold, and that are unscaled twice between two updates."""
    for check in filter(partial(_scaled, case), case.described.checks.events):
        for shared in check.data.get("shared") or []:
            first, count = _moment(case, check), shared["count"]
            other = case.described.optimizer_name(shared["optimizer"])
            text = f"{texts.times(count, 'parameter')} in both: {', '.join(shared['tensors'])}."
            yield case.finding(
                "shared_parameter",
                "error",
                texts.HEADLINES["shared_parameter"].format(
                    first=texts.at(first),
                    optimizer=check.data["class"],
                    other=other,
                    tensor=shared["tensors"][0],
                ),
                first=first,
                evidence=[Evidence(text=text, value=count, unit="parameters", tensor=shared["tensors"][0])],
                advice=texts.ADVICE["shared_parameter"],
                confidence=1.0,
                tensor=shared["tensors"][0],
            )


def no_gradients(case: Case) -> Iterator[Finding]:
    """An optimizer that is stepped although none of its parameters has a gradient, or that never can have one."""
    for check in case.described.checks.events:
        data = check.data
        if (data.get("on_meta") or {}).get("count"):
            continue  # which is why
        why = _why_none(data)
        stepped = (
            data.get("stepped_empty") and case.described.scaler_class != "ShardedGradScaler"
        )  # an empty shard
        if not stepped and not (data.get("static") and _never_has_one(data, why)):
            continue
        first = _moment(case, check)
        total = data["trainable"] + data["frozen"]
        text = (
            f"{total} parameters: {data['trainable']} trainable, {data['frozen']} frozen, {_foreign(data)}."
        )
        evidence = [Evidence(text=text, value=total, unit="parameters", attempt=check.attempt)]
        yield case.finding(
            "no_gradients",
            "error",
            texts.HEADLINES["no_gradients"].format(
                first=texts.at(first), optimizer=data["class"], why=texts.WHY_NONE[why]
            ),
            first=first,
            evidence=evidence + _instead(data),
            advice=texts.ADVICE[f"no_gradients.{why}"],
            confidence=0.7 if why == "unknown" else 1.0,
        )


def on_meta(case: Case) -> Iterator[Finding]:
    """An optimizer that holds parameters without numbers, in whose place the model may have others by now."""
    for check in _latest(case):
        seen = check.data.get("on_meta")
        if not seen or not seen["count"]:
            continue
        tensor, first = seen["tensors"][0], _moment(case, check)
        text = f"On the meta device: {', '.join(seen['tensors'])}."
        yield case.finding(
            "no_gradients",
            "error",
            texts.HEADLINES["no_gradients.meta"].format(
                count=texts.times(seen["count"], "parameter"),
                optimizer=check.data["class"],
                tensor=texts.first_of(tensor, seen["count"]),
                first=texts.at(first),
            ),
            first=first,
            evidence=[Evidence(text=text, value=seen["count"], unit="parameters", tensor=tensor)],
            advice=texts.ADVICE["no_gradients.meta"],
            confidence=1.0,
            tensor=tensor,
        )


def untrained(case: Case) -> Iterator[Finding]:
    """Trainable parameters that never had a gradient while others of their optimizer had one in every attempt."""
    mine = case.described.streams.get(case.index, {}).get("optimizers", [])
    looks = {i: [d for e in case.described.checks.events if (d := e.data).get("id") == i] for i in mine}
    told = [look["without_grad"] for same in looks.values() for look in same if "without_grad" in look]
    had = sum(same[-1].get("without_grad", {}).get("elements", 0) for same in looks.values() if same)
    sharded = case.described.scaler_class == "ShardedGradScaler"
    if not told or case.stream.attempts < NEVER_IN or case.stream.most_elements > had or sharded:
        return
    for same in looks.values():
        without = [look.get("without_grad", {}) for look in same]
        names = without[-1].get("tensors", []) if without else []
        is_replaced = any("unowned" in look for look in same)  # of which more is known
        if names and not is_replaced and all(each.get("tensors") == names for each in without):
            yield _untrained(case, same[-1], without[-1]["count"], names)


def _untrained(case: Case, data: dict[str, Any], count: int, names: list[str]) -> Finding:
    first = case.stream.first or Moment(0, 0)
    text = f"Without a gradient in {texts.times(case.stream.attempts)}, as many elements having one in each: {', '.join(names)}."
    return case.finding(
        "no_gradients",
        "info",
        texts.HEADLINES["no_gradients.some"].format(
            optimizer=data["class"],
            count=texts.times(count, "trainable parameter"),
            tensor=texts.first_of(names[0], count),
            first=texts.at(first),
        ),
        first=first,
        evidence=[Evidence(text=text, value=count, unit="parameters", tensor=names[0])],
        advice=texts.ADVICE["no_gradients.some"],
        confidence=0.8,
        tensor=names[0],
    )


def replaced(case: Case) -> Iterator[Finding]:
    """An optimizer that holds some tensors of another model, while the model trains some that no optimizer holds."""
    for check in case.described.checks.events:
        data = check.data
        missed, foreign = data.get("missed"), data.get("unowned", data.get("foreign"))
        total = data.get("trainable", 0) + data.get("frozen", 0)
        sharded = case.described.scaler_class == "ShardedGradScaler"
        if not missed or not missed["count"] or not foreign or foreign == total or sharded:
            continue
        first, tensor = _moment(case, check), missed["tensors"][0]
        text = f"The model trains {texts.times(missed['count'], 'parameter')} that no optimizer holds: {', '.join(missed['tensors'])}."
        yield case.finding(
            "no_gradients",
            "warning",
            texts.HEADLINES["no_gradients.replaced"].format(
                optimizer=data["class"], foreign=foreign, total=total, tensor=tensor, first=texts.at(first)
            ),
            first=first,
            evidence=[Evidence(text=text, value=missed["count"], unit="parameters", tensor=tensor)],
            advice=texts.ADVICE["no_gradients.foreign"],
            confidence=0.8,
            tensor=tensor,
        )


def missing_scaler(case: Case) -> Iterator[Finding]:
    """float16 autocast with a scaler that is off, or with none."""
    told = _told_float16(case.described)
    if not told or not is_off(case):
        return
    yield case.finding(
        "missing_scaler",
        "error",
        texts.HEADLINES["missing_scaler"],
        first=Moment(0, 0),
        evidence=[Evidence(text=told, attempt=0)],
        advice=texts.ADVICE["missing_scaler"],
        confidence=1.0,
    )


def _told_float16(described: Described) -> str:
    """How it is known that gradients are computed in float16; empty where they are not."""
    if described.autocast == "float16":
        return "Autocast runs with float16, and no loss scaler is on."
    born = described.born("float16") if described.autocast is None else ()
    return (
        f"{texts.times(len(born), 'gradient')} computed in float16, and no loss scaler is on." if born else ""
    )


def epsilon_underflow(case: Case) -> Iterator[Finding]:
    """An eps that is 0 in float16, in an optimizer that computes in float16."""
    for check in _latest(case):
        data = check.data
        eps = data.get("eps")
        if eps is None or not 0 <= eps < FLOAT16_EPS or data.get("fused"):
            continue
        if "float16" in (data.get("low") or {}) and not _scaled(case, check):
            yield _epsilon(case, check, "parameters", "fatal")
        elif "float16" in data.get("state_dtypes", ()):
            poisoned = any(
                e.data.get("parameters", {}).get("count") for e in case.described.finite_checks.events
            )
            yield _epsilon(case, check, "state", "fatal" if poisoned else "warning")


def closure(case: Case) -> Iterator[Finding]:
    """An optimizer whose step() wants a closure, which a scaler does not support; before any training only."""
    for check in case.described.checks.events:
        if check.data.get("static") and check.data.get("closure") and _scaled(case, check):
            fault = texts.FAULTS["closure_wanted"].format(optimizer=check.data["class"])
            yield case.finding(
                "call_order",
                "error",
                texts.HEADLINES["call_order"].format(first="step 0", fault=fault, raised=texts.RAISED[True]),
                first=Moment(0, 0),
                advice=texts.ADVICE["call_order.closure"],
                confidence=1.0,
            )


def _epsilon(case: Case, check: Event, what: str, severity: Severity) -> Finding:
    data, first = check.data, _moment(case, check)
    text = f"eps is {data['eps']:g}; float16 rounds everything below 3e-8 to 0."
    headline = texts.HEADLINES[f"epsilon_underflow.{severity}"].format(
        first=texts.at(first), optimizer=data["class"], what=what, eps=f"{data['eps']:g}"
    )
    return case.finding(
        "epsilon_underflow",
        severity,
        headline,
        first=first,
        evidence=[Evidence(text=text, value=data["eps"], attempt=check.attempt)],
        advice=texts.fill(texts.ADVICE["epsilon_underflow"], what=what),
        confidence=0.95 if severity == "fatal" else 0.6,
    )


def _latest(case: Case) -> list[Event]:
    """The newest check of each optimizer."""
    newest = {event.data.get("id"): event for event in case.described.checks.events}
    return list(newest.values())


def _moment(case: Case, check: Event) -> Moment:
    attempt = max(check.attempt, 0)
    return Moment(attempt, case.step_of(attempt))


def is_off(case: Case) -> bool:
    """Whether there is no scaler, or none that is enabled."""
    scalers = list(case.described.scalers.values())
    absent = any(
        check.data.get("static") and check.data.get("scaled") is False
        for check in case.described.checks.events
    )
    return absent or (bool(scalers) and all(scaler.get("enabled") is False for scaler in scalers))


def _scaled(case: Case, check: Event) -> bool:
    return check.data.get("scaled", True) and not is_off(case)


def _is_refused(case: Case, dtype: str, data: dict[str, Any]) -> bool:
    """Whether torch raises: always for complex, for float16 unless fused or sharded, for bfloat16 on CUDA."""
    if dtype.startswith("complex"):
        return True
    if dtype == "float16":
        return not data.get("fused") and case.described.scaler_class != "ShardedGradScaler"
    return not data.get("fused") and "cuda" in data.get("devices", ())


def _named(dtype: str, names: list[str]) -> Evidence:
    return Evidence(text=f"Trainable in {dtype}: {', '.join(names)}.", tensor=names[0])


def _why_none(data: dict[str, Any]) -> str:
    total = data.get("trainable", 0) + data.get("frozen", 0)
    if data.get("trainable") == 0:
        return "frozen"
    if data.get("foreign") == total or data.get("instead"):
        return "foreign"
    return "detached" if data.get("loss_has_graph") is False else "unknown"


def _instead(data: dict[str, Any]) -> list[Evidence]:
    seen = data.get("instead")
    if not seen:
        return []
    text = f"{texts.times(seen['count'], 'parameter')} with a gradient and in no optimizer: {', '.join(seen['tensors'])}."
    return [Evidence(text=text, value=seen["count"], unit="parameters", tensor=seen["tensors"][0])]


def _never_has_one(data: dict[str, Any], why: str) -> bool:
    """Before any training: nothing to train, or tensors of another model while no optimizer holds this one's."""
    return why == "frozen" or (why == "foreign" and bool((data.get("missed") or {}).get("count")))


def _foreign(data: dict[str, Any]) -> str:
    foreign = data.get("foreign")
    return "the model's own not known" if foreign is None else f"{foreign} of them not the model's"
