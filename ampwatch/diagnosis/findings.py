"""What the diagnosis says: findings, and the verdict over them."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

Severity = Literal["fatal", "error", "warning", "info"]
SEVERITIES: Final[tuple[Severity, ...]] = ("fatal", "error", "warning", "info")
State = Literal["open", "recovered", "explained", "acknowledged"]


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """One measured fact that a finding rests on.

    Arguments:
        text: the fact in words, numbers with their units.
        value: the number alone, where there is one; `unit` is its unit.
        attempt: the moment it was measured at, for the link; -1 where it is no moment.
        tensor: name of the tensor or module it speaks of.
    """

    text: str
    value: float | None = None
    unit: str = ""
    attempt: int = -1
    tensor: str = ""


class Advice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing to do, in order of preference: what, what it will change, and code to paste."""

    text: str
    code: str = ""


class Link(msgspec.Struct, frozen=True):
    """One event of a chain: `kind` and what it is in a few words, since when."""

    kind: str
    text: str
    attempt: int
    step: int


class Finding(msgspec.Struct, frozen=True):
    """A fault, or an explained event, that the records prove.

    `first_*` and `last_*` bound it; attempts are those of the producer, steps the user's own. `headline` is one
    sentence: what, since which step, whether it recovers by itself. `chain` tells which event came first and what followed
    from it, this one among them; empty where nothing did. `confidence` is in [0, 1]. `key` names the finding over re-diagnosis: kind, rank, producer, stream and first attempt.
    """

    kind: str
    severity: Severity
    headline: str
    first_attempt: int
    last_attempt: int
    first_step: int
    last_step: int
    evidence: list[Evidence]
    advice: list[Advice]
    confidence: float
    state: State
    rank: int = 0
    producer: str = ""
    stream: int = 0
    module: str = ""
    tensor: str = ""
    chain: list[Link] = []

    @property
    def key(self) -> str:
        """Identity of the finding while the run grows."""
        return f"{self.kind}-{self.rank}-{self.producer[:8]}-{self.stream}-{self.first_attempt}"

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON-ready builtins, its key included."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built | {"key": self.key}


class Verdict(msgspec.Struct, frozen=True):
    """One sentence over a run.

    Arguments:
        word: `healthy`, `failing` (fatal or error), `warning`, or `no data`.
        severity: that of the worst finding, None without findings.
        kind: that of the headline finding, None where the run is healthy.
        sentence: what to read first, with the step and the module where they are known.
        not_judged: what was not recorded, so that nothing is said of it; empty where all was.
    """

    word: Literal["healthy", "warning", "failing", "no data"]
    severity: Severity | None
    kind: str | None
    sentence: str
    first_step: int = -1
    module: str = ""
    tensor: str = ""
    not_judged: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The verdict as JSON-ready builtins."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built
