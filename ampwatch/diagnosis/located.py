"""A non-finite loss whose origin observers have located: an overflow, a mask, or the loss itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from . import texts
from .case import Case
from .divergence import FIRST_STEPS
from .episodes import Episode
from .evidence import loss_before, recovery, to_no_avail, way_back
from .findings import Advice, Evidence, Finding
from .moments import Moment

LARGE: Final = 32.0  # two such numbers in a product over 64 elements pass 65504
NEAR_LIMIT: Final = 2.0**13
_LINEAR: Final = frozenset({"Linear", "Bilinear", "Conv1d", "Conv2d", "Conv3d"})
"""Modules that only multiply and add: they make NaN of finite numbers only where an inf comes in between."""

# operations that make inf of finite numbers where float16 ends; others (Mul, Sub, Softmax, …) seldom do
_MAKE_INF: Final = frozenset(
    (
        *("Log", "Log2", "Log10", "Log1P", "Exp", "Expm1", "Pow", "Logit", "Logsumexp", "Tan", "Atanh"),
        *(
            "Sum",
            "Prod",
            "Cumsum",
            "Norm",
            "LinalgVectorNorm",
            "Mm",
            "Bmm",
            "Addmm",
            "Baddbmm",
            "Dot",
            "Mv",
            "Cdist",
        ),
        *("Div", "Reciprocal", "Rsqrt", "BinaryCrossEntropy", "CtcLoss", "KlDiv", "MseLoss"),
    )
)

Data = Mapping[str, Any]


class Seen(NamedTuple):
    """What observers saw of an episode: data of a `forward_search` and of an `operations` event, or empty.

    `attempt` is the one that they looked at, -1 where nobody did.
    """

    search: Data
    operations: Data
    attempt: int = -1

    @property
    def origin(self) -> Data:
        """The module that made inf or NaN of finite inputs; empty where none is known."""
        return self.search.get("origin") or {}

    @property
    def loss(self) -> Data:
        """What the loss was made of."""
        return self.operations.get("loss") or {}

    @property
    def softmax(self) -> Data:
        """The first softmax that was given a row without a finite number."""
        return self.operations.get("softmax") or {}

    @property
    def loss_breaks(self) -> bool:
        """Whether everything that the loss is made of is finite."""
        if self.loss.get("inputs_finite") is not None:
            return bool(self.loss["inputs_finite"]) and self.loss.get("finite") is False
        return self.search.get("outputs_finite") is True or is_loss(self.origin)


def seen_in(case: Case, episode: Episode) -> Seen:
    """What observers saw: the first search that names an origin, else the first."""
    span = episode.first.attempt, episode.last.attempt
    searches = case.described.searches.between(*span)
    operations = case.described.operations.between(*span)
    search = next((e for e in searches if e.data.get("origin")), searches[0] if searches else None)
    operation = operations[0] if operations else None
    told = search or operation
    return Seen(
        search.data if search else {}, operation.data if operation else {}, told.attempt if told else -1
    )


def looked_in_vain(seen: Seen) -> bool:
    """Whether the loss that was looked at was finite after all."""
    return seen.loss.get("finite") is True and not seen.origin


def is_loss(origin: Data) -> bool:
    """Whether a module is a loss by its class."""
    return str(origin.get("module_type", "")).endswith("Loss")


def located(case: Case, episode: Episode, first: Moment, seen: Seen) -> Finding | None:
    """The finding that what was seen proves; None where it proves nothing."""
    if _is_masked(seen) or _is_product(seen):
        return _mask_constant(case, episode, first, seen)
    if seen.loss_breaks:
        half = case.described.loss_dtypes.get(case.index) == "float16" or not _MAKE_INF.isdisjoint(
            _float16(seen)
        )
        return _loss_in_fp16(case, episode, first, seen) if half else None
    proven = is_born(seen) and _says_overflow(seen)
    return _forward_overflow(case, episode, first, seen) if proven else None


def _float16(seen: Seen) -> list[str]:
    """Operations of the loss in float16, in the order in which they ran."""
    return list(reversed(seen.loss.get("float16") or []))


def is_born(seen: Seen) -> bool:
    """A module made inf or NaN of finite inputs with finite parameters, and it is not the loss."""
    origin, search = seen.origin, seen.search
    if not origin or search.get("parameters_finite") is False or search.get("inputs_finite") is False:
        return False
    made = origin.get("output_n_inf", 0) + origin.get("output_n_nan", 0) > 0
    return made and not origin.get("input_n_nonfinite")


def _is_masked(seen: Seen) -> bool:
    """Rows of scores that are -inf throughout, in a softmax of the module at the origin, and none that overflowed."""
    masked = seen.softmax.get("masked", 0) > 0 and seen.softmax.get("overflowed") == 0
    return masked and is_born(seen) and _within(seen.softmax["module"], seen.origin.get("module", ""))


def _is_product(seen: Seen) -> bool:
    """Rows of scores with NaN beside -inf and without +inf, made of numbers that are too small to overflow."""
    found = seen.softmax
    undefined = found.get("undefined", 0) > 0 and found.get("infinite") == 0
    small = is_born(seen) and not _says_overflow(seen)
    return undefined and small and _within(found["module"], seen.origin.get("module", ""))


def _within(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")


def _mask_constant(case: Case, episode: Episode, first: Moment, seen: Seen) -> Finding:
    module = str(seen.softmax["module"])
    name, rows, product = texts.module(module), seen.softmax["rows"], _is_product(seen)
    count = seen.softmax["undefined" if product else "masked"]
    what = (
        "hold NaN beside -inf; none holds +inf" if product else "are -inf throughout; none holds +inf or NaN"
    )
    text = f"{count} of {rows} rows of scores in {name} {what}."
    evidence = Evidence(text=text, value=count, unit="rows", attempt=seen.attempt, tensor=name)
    return case.finding(
        "mask_constant",
        "fatal",
        texts.HEADLINES["mask_constant.product" if product else "mask_constant"].format(
            module=name, first=texts.at(first), recovery=recovery(episode, certain=True)
        ),
        first=first,
        last=episode.last,
        evidence=[
            evidence,
            *to_no_avail(episode),
            *way_back(episode, case.stream.interval),
            *loss_before(episode),
        ],
        advice=texts.ADVICE["mask_constant"],
        state="recovered" if episode.closed else "open",
        module=module,
    )


def _loss_in_fp16(case: Case, episode: Episode, first: Moment, seen: Seen) -> Finding:
    named = _float16(seen)
    text = "Every output of a module that the loss is made of is finite."
    evidence = [Evidence(text=text, attempt=seen.attempt)]
    if named:
        text = f"Computed in float16 after them: {', '.join(named)}."
        evidence.append(Evidence(text=text, attempt=seen.attempt))
    if case.described.loss_dtypes.get(case.index) == "float16":
        evidence.append(Evidence(text="The loss itself is float16 at scale()."))
    return case.finding(
        "loss_in_fp16",
        "fatal",
        texts.HEADLINES["loss_in_fp16"].format(
            first=texts.at(first), recovery=recovery(episode, certain=episode.nonfinite >= 5)
        ),
        first=first,
        last=episode.last,
        evidence=[
            *evidence,
            *to_no_avail(episode),
            *way_back(episode, case.stream.interval),
            *loss_before(episode),
        ],
        advice=texts.ADVICE["loss_in_fp16"],
        confidence=0.95 if math.isinf(episode.loss_last) else 0.8,  # targets that are NaN make NaN, never inf
        state="recovered" if episode.closed else "open",
    )


def _forward_overflow(case: Case, episode: Episode, first: Moment, seen: Seen) -> Finding:
    module = str(seen.origin.get("module") or "")
    name = texts.module(module)
    headline = texts.HEADLINES["forward_overflow"].format(
        module=name, first=texts.at(first), recovery=recovery(episode, certain=True)
    )
    return case.finding(
        "forward_overflow",
        "fatal",
        headline,
        first=first,
        last=episode.last,
        evidence=[
            *at_origin(seen, name),
            *to_no_avail(episode),
            *way_back(episode, case.stream.interval),
            *loss_before(episode),
        ],
        advice=[*_of_first_steps(episode), *texts.fill(texts.ADVICE["forward_overflow"], module=name)],
        state="recovered" if episode.closed else "open",
        module=module,
    )


def _of_first_steps(episode: Episode) -> list[Advice]:
    """What would tell whether the first steps were too large, where it breaks right behind them."""
    if not 0 < episode.taken_before <= FIRST_STEPS or not math.isfinite(episode.loss_before + episode.lr):
        return []
    steps = texts.times(episode.taken_before, "step")
    return texts.fill(texts.ADVICE["forward_overflow.first_steps"], steps=steps, rate=f"{episode.lr:.4g}")


def at_origin(seen: Seen, name: str) -> list[Evidence]:
    """What was measured at the module that made inf or NaN."""
    origin, attempt = seen.origin, seen.attempt
    largest, n_inf, n_nan = (origin.get(key) for key in ("input_max_abs", "output_n_inf", "output_n_nan"))
    evidence = []
    if largest is not None:
        text = f"The inputs of {name} are finite, the largest magnitude is {largest:.4g}."
        evidence.append(Evidence(text=text, value=largest, attempt=attempt, tensor=name))
    inside = _largest(origin.get("children_max_abs"))
    if inside is not None:
        text = f"The largest finite magnitude inside it is {inside:.4g}; float16 ends at 65504."
        evidence.append(Evidence(text=text, value=inside, attempt=attempt, tensor=name))
    if _scores_overflowed(seen):
        text = f"{seen.softmax['overflowed']} of {seen.softmax['rows']} rows of scores hold inf or NaN before the softmax."
        evidence.append(
            Evidence(text=text, value=seen.softmax["overflowed"], unit="rows", attempt=attempt, tensor=name)
        )
    text = f"Its output holds {n_inf or 0} inf and {n_nan or 0} NaN."
    evidence.append(
        Evidence(text=text, value=(n_inf or 0) + (n_nan or 0), unit="elements", attempt=attempt, tensor=name)
    )
    return [*evidence, Evidence(text="All parameters are finite.", attempt=attempt)]


def _scores_overflowed(seen: Seen) -> bool:
    overflowed = seen.softmax.get("infinite", seen.softmax.get("overflowed", 0)) > 0
    return overflowed and _within(seen.softmax["module"], seen.origin.get("module", ""))


def _says_overflow(seen: Seen) -> bool:
    origin = seen.origin
    inside = max(_largest(origin.get("children_max_abs")) or 0.0, origin.get("input_max_abs") or 0.0)
    near = (origin.get("output_max_abs") or 0.0) >= NEAR_LIMIT
    if origin.get("module_type") in _LINEAR:  # its weights may have become inf in float16
        return True
    return bool(origin.get("output_n_inf")) or inside >= LARGE or near or _scores_overflowed(seen)


def _largest(magnitudes: Any) -> float | None:
    if isinstance(magnitudes, Mapping):
        magnitudes = max(magnitudes.values(), default=None)
    return None if magnitudes is None else float(magnitudes)
