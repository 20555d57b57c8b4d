"""Single losses that are not finite: which batch, and whether it comes again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from . import texts
from .case import Case
from .episodes import Episode
from .evidence import loss_before
from .findings import Advice, Evidence, Finding
from .forward import what_is_known
from .gradients import looks_at_raw
from .located import looked_in_vain, seen_in
from .moments import Moment

PERIODS: Final = 2  # equal gaps between three of them; where epochs are logged, the same place in two


class _Pattern(NamedTuple):
    """What the batches have in common: a headline, its words, and how sure it is."""

    key: str
    words: dict[str, str]
    confidence: float


def bad_batch(case: Case) -> Iterator[Finding]:
    """All isolated non-finite losses of a stream as one finding."""
    isolated = [e for e in case.stream.all_episodes() if is_isolated(e)]
    if isolated:
        yield _finding(case, isolated)


def is_isolated(episode: Episode) -> bool:
    """One attempt only, and none that the scale explains."""
    return episode.nonfinite == 1 and not (episode.calibrates or episode.probes)


def _finding(case: Case, isolated: Sequence[Episode]) -> Finding:
    first, last = _moment(isolated[0]), isolated[-1]
    unskipped = any(e.unskipped for e in isolated)
    pattern = _pattern(isolated) or _unexplained(isolated, unskipped)
    where, advice, module = _seen(case, isolated)
    loss = "not finite" if last.closed else _loss_word(last.loss_last)
    headline = texts.HEADLINES[pattern.key].format(
        loss=loss,
        first=texts.at(first),
        recovery=_recovery(last),
        count=len(isolated),
        harm=texts.HARM["taken" if unskipped else "skipped"],
        **pattern.words,
    )
    return case.finding(
        "bad_batch",
        "warning",
        headline,
        first=first,
        last=_moment(last),
        evidence=[
            *_logged(isolated),
            *_kept_finite(case, unskipped),
            *where,
            *loss_before(isolated[0]),
            *_again(isolated),
        ],
        advice=[*_advice(pattern, first), *advice],
        confidence=pattern.confidence,
        state="recovered" if last.closed else "open",
        module=module,
    )


def _advice(pattern: _Pattern, first: Moment) -> list[Advice]:
    told = texts.ADVICE.get(pattern.key, texts.ADVICE["bad_batch"])
    return texts.fill(told, first=texts.at(first), **pattern.words)


def _seen(case: Case, isolated: Sequence[Episode]) -> tuple[list[Evidence], list[Advice], str]:
    """Where it starts, if observers were there at one of them: evidence, what to do, and the module."""
    looked = (seen_in(case, episode) for episode in isolated)
    seen = next((each for each in looked if each.attempt >= 0 and not looked_in_vain(each)), None)
    if seen is None:
        return [], [], ""
    _, evidence, advice = what_is_known(seen)
    at = texts.at_step(case.step_of(seen.attempt), seen.attempt)
    told = Evidence(text=texts.SEEN_LATER.format(at=at), attempt=seen.attempt)
    return (
        [told, *evidence] if evidence else [],
        advice if evidence else [],
        str(seen.origin.get("module") or ""),
    )


def _pattern(isolated: Sequence[Episode]) -> _Pattern | None:
    """The same batch twice, the same place in two epochs, or three at equal distances."""
    ids = Counter(e.batch for e in isolated if not math.isnan(e.batch))
    for batch_id, times in ids.most_common(1):
        if times >= 2:
            return _Pattern("bad_batch.batch", {"batch": f"{batch_id:g}", "times": str(times)}, 0.95)
    places = Counter(e.position for e in isolated if e.position >= 0)
    for place, times in places.most_common(1):
        epochs = {e.epoch for e in isolated if e.position == place}
        if times >= 2 and len(epochs) >= 2:
            return _Pattern("bad_batch.place", {"place": str(place), "times": str(times)}, 0.95)
    return _period(isolated)


def _unexplained(isolated: Sequence[Episode], unskipped: bool) -> _Pattern:
    if len(isolated) > 1:
        return _Pattern("bad_batch.times", {}, 0.6)
    return _Pattern("bad_batch.taken" if unskipped else "bad_batch", {}, 0.6)


def _period(isolated: Sequence[Episode]) -> _Pattern | None:
    attempts = [_moment(e).attempt for e in isolated]
    gaps = {b - a for a, b in pairwise(attempts)}
    if len(attempts) <= PERIODS or len(gaps) != 1:
        return None
    return _Pattern("bad_batch.period", {"period": str(gaps.pop())}, 0.8)


def _recovery(episode: Episode) -> str:
    closed = episode.closed
    return texts.RECOVERY["went on"].format(closed=texts.at(closed)) if closed else texts.RECOVERY["open"]


def _logged(isolated: Sequence[Episode]) -> list[Evidence]:
    known = [e for e in isolated if not math.isnan(e.batch)]
    if not known:
        return []
    named = ", ".join(f"{e.batch:g} at {texts.at(_moment(e))}" for e in known[:8])
    return [Evidence(text=f"Batches: {named}.", attempt=_moment(known[0]).attempt)]


def _kept_finite(case: Case, unskipped: bool) -> list[Evidence]:
    """What is known of gradients that are finite although the loss is NaN."""
    seen = case.stream.habits.cleaned
    if not unskipped or seen.first is None:
        return []
    text = texts.KEPT_FINITE["whole" if looks_at_raw(case) else "unknown"]
    return [Evidence(text=text, attempt=seen.first.attempt)]


def _again(isolated: Sequence[Episode]) -> list[Evidence]:
    if len(isolated) == 1:
        return []
    last = _moment(isolated[-1])
    text = f"Seen {len(isolated)} times, the last time at {texts.at(last)}."
    return [Evidence(text=text, attempt=last.attempt)]


def _moment(episode: Episode) -> Moment:
    assert episode.first_nonfinite is not None
    return episode.first_nonfinite


def _loss_word(loss: float) -> str:
    return "NaN" if math.isnan(loss) else "infinite"
