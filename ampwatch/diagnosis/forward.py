"""A loss that is not finite in one attempt after another: a forward pass out of range, or not known yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from . import texts
from .case import Case
from .episodes import SOON, Episode
from .evidence import loss_before, recovery, to_no_avail, way_back
from .findings import Advice, Evidence, Finding
from .located import Seen, at_origin, is_born, located, looked_in_vain, seen_in
from .moments import Moment


def forward(case: Case) -> Iterator[Finding]:
    """One finding for each episode in which the loss was not finite more than once, as precise as observers allow.

    Also for one whose loss was finite, where observers saw that the model makes NaN all the same.
    """
    broken = [e for e in case.stream.all_episodes() if e.first_nonfinite is not None]
    for episode in case.stream.all_episodes():
        if episode.first_nonfinite is None and (finding := _left_out(case, episode)):
            yield finding
    for episode in broken:
        if episode.nonfinite < 2 or episode.calibrates or episode.probes:
            continue
        yield _judged(case, episode, _seen_soon(case, episode, broken))


def _left_out(case: Case, episode: Episode) -> Finding | None:
    """NaN that the model makes and the loss leaves out, as that of padding: the loss is finite, no gradient is.

    Outputs of -inf alone are no fault: so actions are masked. No scale is to blame: the forward pass knows none.
    """
    seen = seen_in(case, episode)
    is_nan = bool(seen.origin.get("output_n_nan")) and seen.search.get("outputs_finite") is False
    return located(case, episode, episode.first, seen) if is_nan and not seen.loss_breaks else None


def _seen_soon(case: Case, episode: Episode, broken: Sequence[Episode]) -> Seen:
    """What observers saw of an episode, or of one soon after it: a loss may be finite again just as they look."""
    later = (e for e in broken if 0 <= e.first.attempt - episode.last.attempt <= SOON)
    for each in (episode, *later):
        seen = seen_in(case, each)
        if seen.attempt >= 0 and not looked_in_vain(seen):
            return seen
    return seen_in(case, episode)


def _judged(case: Case, episode: Episode, seen: Seen) -> Finding:
    assert episode.first_nonfinite is not None
    finding = located(case, episode, episode.first_nonfinite, seen)
    finding = finding or _nonfinite_forward(case, episode, episode.first_nonfinite, seen)
    if seen.attempt <= episode.last.attempt:
        return finding
    at = texts.at_step(case.step_of(seen.attempt), seen.attempt)
    told = Evidence(text=texts.SEEN_LATER.format(at=at), attempt=seen.attempt)
    return msgspec.structs.replace(finding, evidence=[told, *finding.evidence], confidence=0.8)


def _nonfinite_forward(case: Case, episode: Episode, first: Moment, seen: Seen) -> Finding:
    where, evidence, advice = what_is_known(seen)
    module = texts.module(str(seen.origin.get("module") or ""))
    key = "nonfinite_forward.born" if is_born(seen) and not seen.loss_breaks else "nonfinite_forward"
    headline = texts.HEADLINES[key].format(
        first=texts.at(first),
        where=where,
        module=module,
        recovery=recovery(episode, certain=episode.nonfinite >= 5),
    )
    return case.finding(
        "nonfinite_forward",
        "fatal",
        headline,
        first=first,
        last=episode.last,
        evidence=[
            *evidence,
            *to_no_avail(episode),
            *way_back(episode, case.stream.interval),
            *loss_before(episode),
        ],
        advice=advice,
        confidence=0.9,
        state="recovered" if episode.closed else "open",
        module=str(seen.origin.get("module") or "") if is_born(seen) else "",
    )


def what_is_known(seen: Seen) -> tuple[str, list[Evidence], list[Advice]]:
    """Where the search narrowed it down to: words for the headline, evidence, and what to do."""
    advice = texts.ADVICE
    if seen.search.get("parameters_finite") is False:
        text = "Parameters are not finite."
        return ", and parameters are not finite", [Evidence(text=text)], advice["nonfinite_forward.loaded"]
    if seen.search.get("inputs_finite") is False:
        text = "The inputs of the model are not finite."
        return (
            ", and neither are the inputs of the model",
            [Evidence(text=text)],
            advice["nonfinite_forward.inputs"],
        )
    if seen.loss_breaks:
        text = (
            "The outputs of the model are finite, and the loss is not computed in float16 as far as is known."
        )
        return (
            ", although every output of the model is: the loss itself breaks",
            [Evidence(text=text)],
            advice["nonfinite_forward.loss"],
        )
    if is_born(seen):
        name = texts.module(str(seen.origin.get("module") or ""))
        return "", at_origin(seen, name), texts.fill(advice["nonfinite_forward.born"], module=name)
    return "", [], advice["nonfinite_forward"]
