"""What the events of one producer say about it: scalers, streams, tensors, and what observers saw.

Every field is merged so that the order in which events arrive does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ampwatch.records import Event

from .scale_path import DEFAULT_INTERVAL

_KEPT: Final = 64


@dataclass(slots=True)
class Kept:
    """The first 64 and the last 64 events of a type, by attempt and time."""

    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Keep an event, and let one from the middle go where there are too many."""
        self.events.append(event)
        self.events.sort(key=lambda e: (e.attempt, e.time))
        if len(self.events) > 2 * _KEPT:
            del self.events[_KEPT]

    def between(self, first: int, last: int) -> list[Event]:
        """Those that happened, at least once, with first <= attempt <= last."""
        return [e for e in self.events if e.attempt <= last and first < e.attempt + e.repeat]


@dataclass(slots=True)
class Latest(Mapping[Any, Any]):
    """A mapping whose latest value by time wins, whatever order values come in."""

    values_: dict[Any, tuple[float, Any]] = field(default_factory=dict)

    def put(self, key: Any, time: float, value: Any) -> None:
        """Set a value that was true at a time."""
        if key not in self.values_ or self.values_[key][0] <= time:
            self.values_[key] = (time, value)

    def __getitem__(self, key: Any) -> Any:
        return self.values_[key][1]

    def __iter__(self) -> Any:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


@dataclass(slots=True)
class Described:
    """Metadata and observations of one producer; ids and fields as in docs/format.md."""

    scalers: Latest = field(default_factory=Latest)
    streams: Latest = field(default_factory=Latest)
    optimizers: Latest = field(default_factory=Latest)
    tensors: Latest = field(default_factory=Latest)
    autocasts: dict[str, Event] = field(default_factory=dict)
    loss_dtypes: Latest = field(default_factory=Latest)
    call_faults: Kept = field(default_factory=Kept)
    accumulated: Kept = field(default_factory=Kept)
    finite_checks: Kept = field(default_factory=Kept)
    searches: Kept = field(default_factory=Kept)
    operations: Kept = field(default_factory=Kept)
    checks: Kept = field(default_factory=Kept)
    recreated: Kept = field(default_factory=Kept)
    restored: Kept = field(default_factory=Kept)
    went_on: Kept = field(default_factory=Kept)
    skips: Kept = field(default_factory=Kept)
    float32_checks: Kept = field(default_factory=Kept)
    fused_steps: Kept = field(default_factory=Kept)
    weights: Kept = field(default_factory=Kept)
    local_gradients: Kept = field(default_factory=Kept)
    sparse_overflows: Kept = field(default_factory=Kept)
    captured: Kept = field(default_factory=Kept)
    dropped: Kept = field(default_factory=Kept)
    reaches: dict[int, float | None] = field(default_factory=dict)
    averaged_with: int | None = None  # the rank with which all that is trained is averaged
    _replicas: Latest = field(default_factory=Latest)
    _origins: dict[int, tuple[float, str]] = field(default_factory=dict)

    def add(self, events: Iterable[Event]) -> None:
        """Take events in; types that the diagnosis has no use for are left out."""
        for event in events:
            match event.type:
                case "scaler":
                    self.scalers.put(event.data.get("scaler", 0), event.time, event.data)
                    if event.data.get("replaces") is not None:
                        self.recreated.add(event)
                case "skip":
                    self.skips.add(event)
                case "restored":
                    self.restored.add(event)
                case "went_on":
                    self.went_on.add(event)
                case "stream":
                    self.streams.put(event.data.get("stream", 0), event.time, event.data)
                case "optimizers":
                    _put_all(self.optimizers, event, "optimizers")
                case "tensors":
                    _put_all(self.tensors, event, "tensors")
                    self._note_replicas()
                case "origin":
                    self._add_origins(event)
                case "autocast":
                    self._add_autocast(event)
                case "loss_dtype":
                    self.loss_dtypes.put(event.stream, event.time, event.data.get("dtype"))
                case "call_fault":
                    self.call_faults.add(event)
                case "accumulated":
                    self.accumulated.add(event)
                case "finite_check":
                    self.finite_checks.add(event)
                    self._add_reach(event)
                case "forward_search":
                    self.searches.add(event)
                case "operations":
                    self.operations.add(event)
                case "float32_check":
                    self.float32_checks.add(event)
                case "fused_step":
                    self.fused_steps.add(event)
                case "weights":
                    self.weights.add(event)
                case "local_gradients":
                    self.local_gradients.add(event)
                case "sparse_overflow":
                    self.sparse_overflows.add(event)
                case "replicas":
                    self._replicas.put(0, event.time, event.data)
                    self._note_replicas()
                case "captured":
                    self.captured.add(event)
                case "dropped":
                    self.dropped.add(event)
                case "check":
                    self.checks.add(event)
                    self.optimizers.put(event.data.get("id"), event.time, event.data)

    @property
    def autocast(self) -> str | None:
        """The dtype of autocast in the first forward pass that was seen."""
        first = min(self.autocasts.values(), key=lambda event: event.time, default=None)
        return first.data.get("dtype") if first else None

    @property
    def autocast_elsewhere(self) -> str:
        """The device for which autocast was on while the first module computed on another; empty where it was not so."""
        first = min(self.autocasts.values(), key=lambda event: event.time, default=None)
        return str(first.data.get("elsewhere") or "") if first else ""

    @property
    def casts_by_hand(self) -> bool:
        """Whether modules without autocast were seen to compute in float16."""
        return any(event.data.get("by_hand") for event in self.autocasts.values())

    @property
    def replicas(self) -> dict[str, Any]:
        """What of its gradients another rank has too; empty where nothing is averaged, or nobody looked."""
        told: dict[str, Any] = self._replicas.get(0, {})
        return told

    def interval(self, stream: int) -> int:
        """The growth interval of the scaler of a stream, in attempts."""
        return int(self.scaler_of(stream).get("growth_interval") or DEFAULT_INTERVAL)

    def hysteresis(self, stream: int) -> int:
        """Overflows from one backoff of the scaler to the next."""
        return int(self.scaler_of(stream).get("hysteresis") or 1)

    @property
    def is_unscaled(self) -> bool:
        """Whether optimizers are watched and no scaler stands beside them."""
        return bool(self.scalers) and all(told.get("policy") == "none" for told in self.scalers.values())

    def scaler_of(self, stream: int) -> dict[str, Any]:
        """The `scaler` event's data for a stream; empty where it is not known."""
        index = self.streams.get(stream, {}).get("scaler")
        if index is None and len(self.scalers) == 1:
            index = next(iter(self.scalers))
        found: dict[str, Any] = self.scalers.get(index, {})
        return found

    def born(self, dtype: str) -> set[int]:
        """Ids of the tensors whose gradients are known to be computed in a dtype."""
        return {tensor for tensor, (_, origin) in self._origins.items() if origin == dtype}

    def name_of(self, tensor: int) -> str:
        """The name of a tensor, or its number."""
        return str(self.tensors.get(tensor, {}).get("name") or f"tensor {tensor}")

    def module_of(self, tensor: int) -> str:
        """The name of the module that owns a tensor; empty where it is not known."""
        return str(self.tensors.get(tensor, {}).get("module") or "")

    def optimizers_of(self, stream: int) -> list[dict[str, Any]]:
        """What is known of the optimizers that a stream steps."""
        indices = self.streams.get(stream, {}).get("optimizers", [])
        return [self.optimizers[i] for i in indices if i in self.optimizers]

    @property
    def scaler_class(self) -> str:
        """The class of the first scaler."""
        first: dict[str, Any] = next(iter(self.scalers.values()), {})
        return str(first.get("class", ""))

    def optimizer_name(self, index: int | None) -> str:
        """The class of an optimizer, for a sentence."""
        described = self.optimizers.get(index, {})
        return str(described.get("class") or ("the optimizer" if index is None else f"optimizer {index}"))

    def _note_replicas(self) -> None:
        told = self.replicas
        all_of_them = bool(told) and set(self.tensors) <= set(told.get("tensors", ()))
        self.averaged_with = told.get("first") if all_of_them else None

    def _add_reach(self, event: Event) -> None:
        """By attempt, how far the weights reach; None for an attempt that was checked twice. The first and last 64."""
        twice = event.attempt in self.reaches
        self.reaches[event.attempt] = None if twice else event.data.get("parameters", {}).get("reach")
        if len(self.reaches) > 2 * _KEPT:
            del self.reaches[sorted(self.reaches)[_KEPT]]

    def _add_origins(self, event: Event) -> None:
        """A known origin is sticky: the first one stays."""
        for key, origin in event.data.get("origins", {}).items():
            known = self._origins.get(int(key))
            if origin != "unknown" and (known is None or event.time < known[0]):
                self._origins[int(key)] = (event.time, origin)

    def _add_autocast(self, event: Event) -> None:
        device = str(event.data.get("device", ""))
        if device not in self.autocasts or event.time < self.autocasts[device].time:
            self.autocasts[device] = event


def _put_all(into: Latest, event: Event, name: str) -> None:
    for described in event.data.get(name, []):
        into.put(described.get("id"), event.time, described)
