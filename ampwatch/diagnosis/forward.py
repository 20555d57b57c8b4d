"""A loss that is not finite: a bad batch, a forward pass out of range, or not known yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from . import texts
from .case import Case
from .facts import Episode, Moment
from .findings import Advice, Evidence, Finding

LARGE: Final = 32.0  # two such numbers in a product over 64 elements pass 65504
NEAR_LIMIT: Final = 2.0**13


def forward(case: Case) -> Iterator[Finding]:
    """One finding for each episode in which the loss was not finite, as precise as observers allow."""
    for episode in case.stream.all_episodes():
        if episode.first_nonfinite is None or episode.calibrates or episode.probes:
            continue
        search = _search(case, episode)
        origin = search.get("origin") or {}
        if episode.nonfinite == 1:
            yield _bad_batch(case, episode, episode.first_nonfinite)
        elif _overflowed(search, origin):
            yield _forward_overflow(case, episode, episode.first_nonfinite, origin)
        else:
            yield _nonfinite_forward(case, episode, episode.first_nonfinite, search)


def _search(case: Case, episode: Episode) -> Mapping[str, Any]:
    """What the forward search of the episode saw: the first that names an origin, else the first."""
    found = [e.data for e in case.described.searches.between(episode.first.attempt, episode.last.attempt)]
    return next((data for data in found if data.get("origin")), found[0] if found else {})


def _overflowed(search: Mapping[str, Any], origin: Mapping[str, Any]) -> bool:
    """A module made inf or NaN of finite inputs with finite parameters, and it is not the loss."""
    if not origin or search.get("parameters_finite") is False or search.get("inputs_finite") is False:
        return False
    made = origin.get("output_n_inf", 0) + origin.get("output_n_nan", 0) > 0
    return made and not origin.get("input_n_nonfinite") and not _is_loss(origin)


def _is_loss(origin: Mapping[str, Any]) -> bool:
    return str(origin.get("module_type", "")).endswith("Loss")


def _bad_batch(case: Case, episode: Episode, first: Moment) -> Finding:
    closed = episode.closed
    recovery = texts.RECOVERY["went on"].format(closed=texts.at(closed)) if closed else texts.RECOVERY["open"]
    loss = "not finite" if closed else _loss_word(episode.loss_last)
    headline = texts.HEADLINES["bad_batch"].format(loss=loss, first=texts.at(first), recovery=recovery)
    return case.finding(
        "bad_batch",
        "warning",
        headline,
        first=first,
        last=first,
        evidence=_before(episode),
        advice=texts.BAD_BATCH,
        confidence=0.6,
        state="recovered" if closed else "open",
    )


def _forward_overflow(case: Case, episode: Episode, first: Moment, origin: Mapping[str, Any]) -> Finding:
    module = str(origin.get("module") or "")
    name = texts.module(module)
    headline = texts.HEADLINES["forward_overflow"].format(
        module=name, first=texts.at(first), recovery=_recovery(episode, certain=True)
    )
    return case.finding(
        "forward_overflow",
        "fatal",
        headline,
        first=first,
        last=episode.last,
        evidence=[*_at_origin(origin, name, episode), *_to_no_avail(episode), *_before(episode)],
        advice=texts.fill(texts.FORWARD_OVERFLOW, module=name),
        confidence=0.95 if _says_overflow(origin) else 0.75,
        state="recovered" if episode.closed else "open",
        module=module,
    )


def _nonfinite_forward(case: Case, episode: Episode, first: Moment, search: Mapping[str, Any]) -> Finding:
    origin = search.get("origin") or {}
    module = str(origin.get("module") or "")
    where, evidence, advice = _what_is_known(case, episode, search)
    headline = texts.HEADLINES["nonfinite_forward"].format(
        first=texts.at(first), where=where, recovery=_recovery(episode, certain=episode.nonfinite >= 5)
    )
    return case.finding(
        "nonfinite_forward",
        "fatal",
        headline,
        first=first,
        last=episode.last,
        evidence=[*evidence, *_to_no_avail(episode), *_before(episode)],
        advice=advice,
        confidence=0.9,
        state="recovered" if episode.closed else "open",
        module=module,
    )


def _what_is_known(
    case: Case, episode: Episode, search: Mapping[str, Any]
) -> tuple[str, list[Evidence], list[Advice]]:
    """Where the search narrowed it down to: words for the headline, evidence, and what to do."""
    poisoned = _poisoned(case, episode)
    if poisoned:
        return f": parameters are not finite, {poisoned[0].tensor} first", poisoned, texts.POISONED
    if search.get("inputs_finite") is False:
        text = "The inputs of the model are not finite."
        return ", and neither are the inputs of the model", [Evidence(text=text)], texts.BAD_INPUTS
    if search.get("outputs_finite") is True or _is_loss(search.get("origin") or {}):
        text = "The outputs of the model are finite."
        return (
            ", although every output of the model is: the loss itself breaks",
            [Evidence(text=text)],
            texts.LOSS_ITSELF,
        )
    return "", [], texts.NONFINITE_FORWARD


def _poisoned(case: Case, episode: Episode) -> list[Evidence]:
    checks = case.described.finite_checks.between(episode.first.attempt, episode.last.attempt)
    for check in checks:
        seen = check.data.get("parameters", {})
        if seen.get("count"):
            name = str((seen.get("nonfinite") or ["?"])[0])
            text = f"{seen['count']} of {seen.get('checked', '?')} parameters are not finite, the first is {name}."
            return [Evidence(text=text, value=seen["count"], attempt=check.attempt, tensor=name)]
    return []


def _at_origin(origin: Mapping[str, Any], name: str, episode: Episode) -> list[Evidence]:
    attempt = episode.last.attempt
    largest, n_inf, n_nan = (origin.get(key) for key in ("input_max_abs", "output_n_inf", "output_n_nan"))
    evidence = []
    if largest is not None:
        text = f"The inputs of {name} are finite, the largest magnitude is {largest:.4g}."
        evidence.append(Evidence(text=text, value=largest, attempt=attempt, tensor=name))
    inside = _largest(origin.get("children_max_abs"))
    if inside is not None:
        text = f"The largest finite magnitude inside it is {inside:.4g}; float16 ends at 65504."
        evidence.append(Evidence(text=text, value=inside, attempt=attempt, tensor=name))
    text = f"Its output holds {n_inf or 0} inf and {n_nan or 0} NaN."
    evidence.append(Evidence(text=text, value=(n_inf or 0) + (n_nan or 0), unit="elements", tensor=name))
    return [*evidence, Evidence(text="All parameters are finite.")]


def _to_no_avail(episode: Episode) -> list[Evidence]:
    if not 0 < episode.scale_after < episode.scale:
        return []
    halvings = round(math.log2(episode.scale / episode.scale_after))
    path = f"from {texts.power(episode.scale)} to {texts.power(episode.scale_after)}"
    text = f"The loss scale was halved {texts.times(halvings, 'time')}, {path}, to no avail: the scale is not the cause."
    return [Evidence(text=text, value=halvings, attempt=episode.last.attempt)]


def _before(episode: Episode) -> list[Evidence]:
    if not math.isfinite(episode.loss_before):
        return []
    text = f"The loss before was {episode.loss_before:.4g} (median)."
    return [Evidence(text=text, value=episode.loss_before, attempt=episode.first.attempt)]


def _recovery(episode: Episode, *, certain: bool) -> str:
    if episode.closed:
        return texts.RECOVERY["recovered"].format(closed=texts.at(episode.closed))
    return texts.RECOVERY["never" if certain else "unknown"]


def _says_overflow(origin: Mapping[str, Any]) -> bool:
    inside = max(_largest(origin.get("children_max_abs")) or 0.0, origin.get("input_max_abs") or 0.0)
    near = (origin.get("output_max_abs") or 0.0) >= NEAR_LIMIT
    return bool(origin.get("output_n_inf")) or inside >= LARGE or near


def _largest(magnitudes: Any) -> float | None:
    if isinstance(magnitudes, Mapping):
        magnitudes = max(magnitudes.values(), default=None)
    return None if magnitudes is None else float(magnitudes)


def _loss_word(loss: float) -> str:
    return "NaN" if math.isnan(loss) else "infinite"
