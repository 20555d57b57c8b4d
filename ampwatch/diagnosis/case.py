"""What a rule is given: the facts of one stream of one producer, and a way to write a finding about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .described import Described
from .facts import Stream
from .findings import Advice, Evidence, Finding, Link, Severity, State
from .moments import Moment
from .samples import Sample


@dataclass(frozen=True)
class Case:
    """The facts of a stream.

    Arguments:
        samples: tensor statistics of sampled attempts of this stream, in order.
        step_of: the user's step at an attempt of the producer.
        streams: all streams of the producer, by index.
    """

    rank: int
    producer: str
    index: int
    stream: Stream
    described: Described
    samples: Sequence[Sample]
    step_of: Callable[[int], int]
    streams: Mapping[int, Stream] = field(default_factory=dict)

    def beside(self) -> list[Stream]:
        """The other streams of the same scaler."""
        told = self.described.streams
        scaler = told.get(self.index, {}).get("scaler")
        same = (i for i in self.streams if i != self.index and told.get(i, {}).get("scaler") == scaler)
        return [self.streams[i] for i in same]

    def finding(
        self,
        kind: str,
        severity: Severity,
        headline: str,
        *,
        first: Moment,
        last: Moment | None = None,
        evidence: Sequence[Evidence] = (),
        advice: Sequence[Advice] = (),
        confidence: float = 0.95,
        state: State = "open",
        module: str = "",
        tensor: str = "",
        chain: Sequence[Link] = (),
    ) -> Finding:
        """A finding about this stream; without `last` it lasts to the newest attempt, without `chain` all of it began at once."""
        last = max(last or self.stream.last, first)
        return Finding(
            kind=kind,
            severity=severity,
            headline=headline,
            first_attempt=first.attempt,
            last_attempt=last.attempt,
            first_step=first.step,
            last_step=last.step,
            evidence=list(evidence),
            advice=list(advice),
            confidence=confidence,
            state=state,
            rank=self.rank,
            producer=self.producer,
            stream=self.index,
            module=module,
            tensor=tensor,
            chain=list(chain),
        )
