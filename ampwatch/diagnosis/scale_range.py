"""Gradients that a larger loss scale would have kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ampwatch.stats.layout import FLOAT16_MAX

from . import texts
from .case import Case
from .findings import Advice, Evidence, Finding
from .moments import Moment
from .samples import Sample
from .underflow import MIN_ELEMENTS, share_at

TOTAL_SHARE: Final = 0.02  # of all float16-born elements: above it a warning
TENSOR_SHARE: Final = 0.20  # of one tensor's elements, if all lose at least TOTAL_SHARE / 4
GOOD_SHARE: Final = 0.01  # what the recommended scale would still lose
KEEP_HEADROOM: Final = 2  # binades that it leaves below 65504
MARGIN_LOG2: Final = 2  # binades beyond the estimate, for what was lost upstream and left no trace
MAX_RAISE_LOG2: Final = 40
SAMPLES: Final = 2  # in a row
PRESUMED_SCALE: Final = (
    1.0  # at or below it an all-zero gradient of unknown origin is presumed to have underflowed
)
ZERO_ATTEMPTS: Final = 5
NARROW_FOR: Final = 28  # attempts
VANISHING: Final = 2.0**-23  # below it a scaled gradient that is zero throughout has underflowed, not ended
FIXED_INTERVAL: Final = 1_000_000
_FLOAT16_MODULES: Final = ("Linear", "Conv1d", "Conv2d", "Conv3d")
_FLOAT32_MODULES: Final = ("Norm", "Embedding")  # in the names of their classes


Ids = npt.NDArray[np.int64]


class Loss(NamedTuple):
    """What one sample says: elements lost and left over all judged tensors, and the worst tensor."""

    attempt: int
    scale: float
    share: float
    bound: float
    norm_share: float
    worst: int
    worst_share: float
    presumed: bool
    judged: npt.NDArray[Any]

    @property
    def matters(self) -> bool:
        """Above the share that a warning is worth."""
        return self.share >= TOTAL_SHARE or (
            self.worst_share >= TENSOR_SHARE and self.share >= TOTAL_SHARE / 4
        )

    @property
    def unseen(self) -> bool:
        """Whether a tensor is zero altogether, so that nothing tells how far below the limit it lies."""
        return bool((self.judged["n_zero"] == self.judged["numel"]).any())

    def is_silent_on(self, tensor: int) -> bool:
        """Whether most of a tensor is zero and too little of it is left to fit: such a sample tells nothing of it."""
        own = self.judged[self.judged["tensor"] == tensor]
        left = own["numel"] - own["n_zero"]
        return bool(((left < MIN_ELEMENTS) & (own["n_zero"] > left)).any())


def underflow(case: Case) -> Iterator[Finding]:
    """Underflow in the newest samples, told from the first of them in a row."""
    lasting: list[Loss] = []
    for loss in _losses(case):
        if loss.matters:
            lasting = [*lasting, loss]
        elif lasting and not loss.is_silent_on(lasting[-1].worst):
            lasting = []
    raise_log2 = _raise(lasting[-1], case.stream.ceiling()) if len(lasting) >= SAMPLES else 0
    if raise_log2 >= 1:
        yield _finding(case, lasting, raise_log2)
    elif _is_narrow(lasting):
        yield _narrow(case, lasting)
    elif not lasting:
        yield from _everything_zero(case)


def _losses(case: Case) -> Iterator[Loss]:
    """What each sample says that can be judged."""
    born, presumable, shown = _born(case), _presumable(case), _Shown()
    for sample in case.samples:
        loss = _loss_in(sample, born, presumable, shown.vanish_in(sample.tensors))
        if loss is not None:
            yield loss


class _Shown:
    """How large the true gradient of each tensor was when it was last seen not to be zero."""

    def __init__(self) -> None:
        self._largest = np.zeros(0)

    def vanish_in(self, tensors: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Tensors that are zero throughout, and so small before that this scale brings them below float16."""
        ids, zero = tensors["tensor"], tensors["n_zero"] == tensors["numel"]
        self._largest = np.append(
            self._largest, np.zeros(max(ids.max(initial=-1) + 1 - len(self._largest), 0))
        )
        with np.errstate(invalid="ignore"):  # nothing at a scale of inf is no number, which is not below any
            scaled = self._largest[ids] * tensors["scale"]
        is_known = ~zero & (tensors["n_bad"] == 0) & (tensors["scale"] > 0)
        self._largest[ids[is_known]] = tensors["max_abs"][is_known] / tensors["scale"][is_known]
        return cast("npt.NDArray[np.bool_]", zero & (scaled > 0) & (scaled < VANISHING))


def _born(case: Case) -> Ids:
    """Tensors whose gradients are computed in float16.

    Those of norms and embeddings never are; at a tiny scale their few bits fall on the float16 grid by accident.
    """
    told = case.described.tensors
    born = (i for i in case.described.born("float16") if not _in_float32(told.get(i, {})))
    return np.array(sorted(born), dtype=np.int64)


def _in_float32(tensor: Mapping[str, Any]) -> bool:
    return any(kind in str(tensor.get("module_type")) for kind in _FLOAT32_MODULES)


def _presumable(case: Case) -> Ids:
    """Weights whose gradients autocast computes in float16, whether or not they ever showed it."""
    if case.described.autocast != "float16":
        return np.empty(0, dtype=np.int64)
    known = case.described.tensors.items()
    weights = (
        i for i, t in known if t.get("module_type") in _FLOAT16_MODULES and len(t.get("shape", ())) > 1
    )
    return np.array(sorted(weights), dtype=np.int64)


def _loss_in(sample: Sample, born_ids: Ids, presumable: Ids, vanished: npt.NDArray[np.bool_]) -> Loss | None:
    """Judge a sample; None where it holds inf or NaN, or no tensor that may be judged.

    Arguments:
        vanished: (tensors,) whether each is known to have underflowed altogether.
    """
    tensors = sample.tensors
    if tensors["n_bad"].any():
        return None
    born = np.isin(tensors["tensor"], born_ids)
    presumed = np.isin(tensors["tensor"], presumable) & _vanished(tensors) & ~born
    judged, gone = tensors[born | presumed], vanished[born | presumed]
    left = (judged["numel"] - judged["n_zero"]).astype(float)
    if len(judged) == 0 or left.sum() + presumed.sum() + gone.sum() == 0:
        return None
    altogether = _total_losses(judged, gone)
    lost = judged["lost"] + altogether
    shares = lost / np.maximum(lost + left, 1)
    worst = int(shares.argmax())
    total = lost.sum() + left.sum()
    return Loss(
        sample.attempt,
        float(judged["scale"][0]),
        float(lost.sum() / total),
        float(judged["n_zero"].sum() / judged["numel"].sum()),
        float(np.where(altogether > 0, 1.0, judged["norm_share"]).max()),
        int(judged["tensor"][worst]),
        float(shares[worst]),
        bool(presumed.any()),
        judged,
    )


def _total_losses(judged: npt.NDArray[Any], gone: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Elements of tensors that are zero altogether, where they or others have shown that the scale is too small."""
    zero = judged["n_zero"] == judged["numel"]
    others = judged[~zero]
    left = float((others["numel"] - others["n_zero"]).sum())
    losing = others["lost"].sum() >= TOTAL_SHARE / 4 * (others["lost"].sum() + left)
    low = judged["scale"] <= PRESUMED_SCALE
    return np.where(zero & (losing | low | gone), judged["numel"], 0.0)


def _vanished(tensors: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Tensors that are zero altogether where others are not, at a scale so small that it is likely the cause."""
    zero = tensors["n_zero"] == tensors["numel"]
    low = tensors["scale"] <= PRESUMED_SCALE
    return cast("npt.NDArray[np.bool_]", zero & low & (not zero.all()))


def _raise(loss: Loss, ceiling: float) -> int:
    """By how many binades the scale should grow; 0 where the largest gradient, or a scale that overflowed, leaves no room."""
    judged = loss.judged
    largest = float(judged["max_abs"].max())
    room = MAX_RAISE_LOG2 if largest == 0 else math.floor(math.log2(FLOAT16_MAX / largest)) - KEEP_HEADROOM
    below = math.floor(math.log2(ceiling / loss.scale)) - 1 if math.isfinite(ceiling) else MAX_RAISE_LOG2
    room = min(room, below, MAX_RAISE_LOG2)
    enough = next((k for k in range(1, room + 1) if _share_after(loss, k) < GOOD_SHARE), room)
    return max(min(room, room if loss.unseen else enough + MARGIN_LOG2), 0)


def _share_after(loss: Loss, raise_log2: int) -> float:
    """The estimated share that a scale 2^raise_log2 times larger would lose."""
    judged = loss.judged
    elements = judged["numel"] - judged["n_zero"] + judged["lost"]
    lost = share_at(judged["shape"], raise_log2) * elements
    return float(lost.sum() / max(elements.sum(), 1))


def _is_narrow(lasting: Sequence[Loss]) -> bool:
    """For 28 attempts a tensor has lost a fifth of its elements, mostly, at a scale that cannot grow.

    Below 1 any loss that is worth a warning is enough: the scale itself takes what float16 would have kept without it.
    """
    if len(lasting) < SAMPLES or lasting[-1].attempt - lasting[0].attempt < NARROW_FOR:
        return False
    return lasting[-1].scale < 1 or median(loss.worst_share for loss in lasting) >= TENSOR_SHARE


def _narrow(case: Case, lasting: Sequence[Loss]) -> Finding:
    """The scale can neither stay, for what is lost, nor grow, for what would overflow."""
    now, first = lasting[-1], _moment(case, lasting[0].attempt)
    low, high = case.described.name_of(now.worst), case.described.name_of(_limiting(case, now))
    return case.finding(
        "narrow_range",
        "warning",
        texts.HEADLINES["narrow_range"].format(
            first=texts.at(first), low=low, high=high, share=texts.percent(now.worst_share)
        ),
        first=first,
        evidence=[*_shares(now, low), _ceiling(case, now, high)],
        advice=texts.fill(texts.ADVICE["narrow_range"], low=low, high=high),
        confidence=0.8,
        module=case.described.module_of(now.worst),
        tensor=low,
    )


def _limiting(case: Case, now: Loss) -> int:
    """The tensor that overflowed in the newest skip, else the one that comes nearest to it."""
    overflowed = [
        tensor for event in case.described.skips.events[-1:] for tensor in event.data.get("tensors", ())
    ]
    return int(overflowed[0] if overflowed else now.judged["tensor"][now.judged["max_abs"].argmax()])


def _finding(case: Case, lasting: Sequence[Loss], raise_log2: int) -> Finding:
    now, first = lasting[-1], _moment(case, lasting[0].attempt)
    name = case.described.name_of(now.worst)
    bound = f" (at most {texts.percent(now.bound)})" if now.bound > 2 * now.share else ""
    headline = texts.HEADLINES["underflow"].format(
        first=texts.at(first),
        share=f"at least {texts.percent(now.share)}",
        bound=bound,
        tensor=name,
        recovery=_recovery(case, raise_log2),
    )
    return case.finding(
        "underflow",
        "warning",
        headline,
        first=first,
        evidence=[*_shares(now, name), _room(now)],
        advice=_advice(now, raise_log2),
        confidence=0.7 if now.presumed else 0.9,
        module=case.described.module_of(now.worst),
        tensor=name,
    )


def _shares(now: Loss, name: str) -> list[Evidence]:
    elements = (
        f"Lower bound over the {len(now.judged)} tensors known to be computed in float16: "
        f"{texts.percent(now.share)} of the elements that should not be zero; the zeros allow {texts.percent(now.bound)}."
    )
    norm = f"In the tensor that loses most of it, at least {texts.percent(now.norm_share)} of the L2 norm."
    worst = f"{name} loses {texts.percent(now.worst_share)} of its elements."
    return [
        Evidence(text=elements, value=now.share, unit="share of elements", attempt=now.attempt),
        Evidence(
            text=worst, value=now.worst_share, unit="share of elements", attempt=now.attempt, tensor=name
        ),
        Evidence(text=norm, value=now.norm_share, unit="share of L2 norm", attempt=now.attempt),
    ]


def _room(now: Loss) -> Evidence:
    largest = float(now.judged["max_abs"].max())
    text = f"The largest scaled gradient is {largest:.3g}, float16 ends at 65504; loss scale {texts.power(now.scale)}."
    return Evidence(text=text, value=largest, attempt=now.attempt)


def _ceiling(case: Case, now: Loss, high: str) -> Evidence:
    """Why the scale cannot grow: it overflowed not long ago, or next to no room is left."""
    attempt, scale = case.stream.overflow
    if not math.isfinite(case.stream.ceiling()):
        return _room(now)
    at = texts.at(_moment(case, attempt))
    text = f"The loss scale is {texts.power(now.scale)}; at {texts.power(scale)} {high} overflowed, at {at}."
    return Evidence(text=text, value=scale, attempt=attempt, tensor=high)


def _advice(now: Loss, raise_log2: int) -> list[Advice]:
    largest = float(now.judged["max_abs"].max())
    headroom = math.log2(FLOAT16_MAX / largest) - raise_log2 if largest else math.inf
    target = now.scale * 2.0**raise_log2
    return texts.fill(
        texts.ADVICE["underflow"],
        raise_log2=raise_log2,
        target=texts.power(target),
        target_log2=f"{math.log2(target):.4g}",
        after=texts.AFTER_UNSEEN if now.unseen else texts.percent(_share_after(now, raise_log2)),
        headroom=f"{headroom:.1f}",
    )


def _recovery(case: Case, raise_log2: int) -> str:
    interval = case.described.interval(case.index)
    if interval >= FIXED_INTERVAL:
        return texts.RECOVERY["fixed"]
    return texts.RECOVERY["grows"].format(attempts=raise_log2 * interval)


def _everything_zero(case: Case) -> Iterator[Finding]:
    """No gradient at all comes through, so that no tensor can show where it was computed."""
    stream, zeros = case.stream, case.stream.zeros
    first = zeros.since
    if first is None or zeros.attempts < ZERO_ATTEMPTS or zeros.losses or not may_underflow(case):
        return
    text = (
        f"All gradient elements of {texts.times(zeros.attempts)} in a row are exactly zero, the loss is not."
    )
    headline = texts.HEADLINES["underflow.all"].format(
        first=texts.at(first), scale=texts.power(stream.scale), recovery=_recovery(case, 16)
    )
    evidence = [Evidence(text=text, value=zeros.attempts, unit="attempts", attempt=first.attempt)]
    yield case.finding(
        "underflow",
        "warning",
        headline,
        first=first,
        evidence=evidence,
        advice=texts.ADVICE["underflow.all"],
        confidence=0.6,
    )


def may_underflow(case: Case) -> bool:
    """Whether zeros of unknown origin are presumed to have underflowed: in float16, at a scale so low."""
    return case.stream.scale <= PRESUMED_SCALE and case.described.autocast == "float16"


def _moment(case: Case, attempt: int) -> Moment:
    return Moment(attempt, case.step_of(attempt))
