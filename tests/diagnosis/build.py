"""Hand-made runs: attempts said one by one under torch's policy, packed as the batches that a run would leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ampwatch.diagnosis import Diagnosis, Finding
from ampwatch.records import MISSING, Batch, Event, pack_events, pack_table

PRODUCER = "0" * 31 + "1"
TENSOR = {
    "name": "head.weight",
    "module": "head",
    "module_type": "Linear",
    "shape": [64, 64],
    "dtype": "float32",
    "optimizer": 0,
}


class Run:
    """One scaler with one optimizer: `clean`, `skip` and `broken` append attempts, the scale follows torch's policy."""

    def __init__(
        self, scale: float = 2.0**16, interval: int = 2000, producer: str = PRODUCER, rank: int = 0
    ) -> None:
        self.scale, self.interval, self.producer, self.rank = scale, interval, producer, rank
        self.rows: list[dict[str, Any]] = []
        self.events: list[Event] = []
        self.tensor_rows: list[dict[str, Any]] = []
        self.step = self.tracker = 0
        self.event("scaler", scaler=0, enabled=True, growth_interval=interval, init_scale=scale)
        self.event("stream", scaler=0, stream=0, optimizers=[0])

    def clean(
        self, n: int = 1, loss: float | Sequence[float] = 1.0, norm: float | Sequence[float] = 1.0
    ) -> Run:
        """Attempts whose step was taken; a sequence gives one attempt for each value."""
        losses = [loss] * n if isinstance(loss, float) else loss
        norms = [norm] * len(losses) if isinstance(norm, float) else norm
        for one_loss, one_norm in zip(losses, norms, strict=True):
            self.tracker += 1
            grows = self.tracker == self.interval
            self._row(one_loss, one_norm, self.scale * (2 if grows else 1), found_inf=0, n_inf=0)
            self.step += 1
            self.tracker = 0 if grows else self.tracker
        return self

    def skip(self, n: int = 1, loss: float = 1.0) -> Run:
        """Attempts that met inf."""
        for _ in range(n):
            self._row(loss, MISSING, self.scale / 2, found_inf=1, n_inf=3)
            self.tracker = 0
        return self

    def broken(self, n: int = 1) -> Run:
        """Attempts whose loss was NaN."""
        return self.skip(n, loss=math.nan)

    def event(self, type_: str, attempt: int | None = None, **data: Any) -> Run:
        """An event at the attempt that comes next, unless said otherwise."""
        at = len(self.rows) if attempt is None else attempt
        self.events.append(Event(type=type_, time=float(at), attempt=at, step=self.step, stream=0, data=data))
        return self

    def tensor(
        self, hist: dict[int, int], zeros: int = 0, tensor: int = 0, max_abs: float | None = None
    ) -> Run:
        """A tensor row at the newest attempt; `hist` counts elements by the log2 of their scaled magnitude."""
        counts = np.zeros(64, dtype=np.int64)
        for log2, count in hist.items():
            counts[log2 + 48] = count
        largest = max_abs if max_abs is not None else 2.0 ** max(hist) if hist else 0.0
        self.tensor_rows.append(
            {
                "attempt": len(self.rows) - 1,
                "stream": 0,
                "tensor": tensor,
                "scale": self.rows[-1]["scale"],
                "hist": counts,
            }
            | {
                "numel": int(counts.sum()) + zeros,
                "n_zero": zeros,
                "max_abs": largest,
                "n_inf": 0,
                "n_nan": 0,
            }
        )
        return self

    def batches(self, size: int = 10_000) -> list[Batch]:
        """Everything as batches of at most `size` rows or events."""
        key = {"producer": self.producer, "run": "run", "rank": self.rank}
        parts: list[tuple[str, list[Any]]] = [
            (kind, rows[i : i + size])
            for kind, rows in (
                ("events", self.events),
                ("attempts", self.rows),
                ("tensors", self.tensor_rows),
            )
            for i in range(0, len(rows), size)
        ]
        return [
            pack_events(rows, seq=seq, **key)
            if kind == "events"
            else pack_table(kind, {n: np.array([r[n] for r in rows]) for n in rows[0]}, seq=seq, **key)
            for seq, (kind, rows) in enumerate(parts)
        ]

    def diagnosis(self) -> Diagnosis:
        return Diagnosis.from_batches(self.batches())

    def findings(self) -> list[Finding]:
        """What is found of the whole; the same as where it comes in parts and is asked for after each."""
        found = self.diagnosis().findings()
        in_parts = Diagnosis()
        for batch in self.batches(size=max(7, len(self.rows) // 8)):
            in_parts.add(batch)
            in_parts.findings()
        assert list(map(repr, in_parts.findings())) == list(map(repr, found))
        for finding in found:
            finding.as_dict()  # raises where something in it is no builtin
        return found

    def kinds(self) -> list[tuple[str, str, str]]:
        """(kind, severity, state) of each finding, in order."""
        return [(f.kind, f.severity, f.state) for f in self.findings()]

    def _row(self, loss: float, norm: float, scale_after: float, **flags: int) -> None:
        self.rows.append(
            {
                "attempt": len(self.rows),
                "stream": 0,
                "step": self.step,
                "scale": self.scale,
                "scale_after": scale_after,
            }
            | {"loss": loss, "norm": norm, "numel": 4096, "n_zero": 0, "losses": 1, "micro_batches": 1}
            | flags
        )
        self.scale = scale_after
