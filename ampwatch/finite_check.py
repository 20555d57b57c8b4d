"""Which parameters and buffers of a model were finite at first, and are no longer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from .hooks import Numbers, Observation, gathered, is_plain, local, magnitudes
from .names import buffers_of, parameters_of, weakly

MOST_NAMES: Final = 16

_Key: TypeAlias = tuple[str, torch.Size]


@dataclass
class _First:
    """The first look at tensors of a kind. One that has got another shape since is another tensor."""

    places: dict[_Key, int] = field(default_factory=dict)
    magnitudes: list[Tensor] = field(
        default_factory=list
    )  # vectors, one after another in the order of the places

    def add(self, tensors: Mapping[_Key, Tensor]) -> None:
        """Look at those that are new."""
        new = [key for key in tensors if key not in self.places]
        if new:
            self.magnitudes.append(magnitudes([tensors[key] for key in new]))
            self.places |= {key: len(self.places) + i for i, key in enumerate(new)}


@dataclass(frozen=True)
class _Now:
    """Names of the tensors of a kind, in the order of their numbers, whether they are trained, and the places of their first ones."""

    kind: str
    names: Sequence[str]
    trained: Sequence[bool]
    places: Sequence[int]
    firsts: int


class FiniteCheck:
    """Which parameters and floating buffers were finite at first and are no longer; event `finite_check`.

    What was not finite at first is no fault and is not looked at again; nor is a buffer that holds nothing but 0 and
    -inf, an attention mask. What a model adds later is first seen by the next look. It needs no hooks: `arm` looks for
    the first time, before any training, and `collect` looks again. The model may be moved to another device between.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakly(model)
        self._first: dict[str, _First] = {}

    def arm(self) -> None:
        """Look for the first time at what is new since the last look. No synchronisation."""
        for kind, tensors in self._tensors().items():
            self._first.setdefault(kind, _First()).add(tensors)

    def disarm(self) -> None:
        """Nothing: there are no hooks. The first look is kept."""

    def collect(self) -> Observation | None:
        """What is not finite now, None before `arm` or without the model. No synchronisation."""
        if not self._first or self._model() is None:
            return None
        self.arm()
        parts: list[Tensor] = []
        looks: list[_Now] = []
        for kind, tensors in self._tensors().items():
            first = self._first[kind]
            parts += [*first.magnitudes, magnitudes([_without_mask(tensors[key], kind) for key in tensors])]
            places = [first.places[key] for key in tensors]
            trained = [tensor.requires_grad for tensor in tensors.values()]
            looks.append(_Now(kind, [name for name, _ in tensors], trained, places, len(first.places)))
        return Observation("finite_check", gathered(parts), partial(_no_longer_finite, looks))

    def _tensors(self) -> dict[str, dict[_Key, Tensor]]:
        """Looked up anew each time: a model may have replaced its buffers."""
        model = self._model()
        if model is None:
            return {}
        return {"parameters": _plain(parameters_of(model)), "buffers": _plain(buffers_of(model))}


def _plain(named: Iterable[tuple[str, Tensor]]) -> dict[_Key, Tensor]:
    return {(name, tensor.shape): own for name, tensor in named if is_plain(own := local(tensor))}


@torch.no_grad()
def _without_mask(tensor: Tensor, kind: str) -> Tensor:
    """In place of a buffer its two ends; zero twice for a mask, which reaches from -inf to 0 and may come late."""
    if kind != "buffers" or tensor.is_complex() or not tensor.numel():
        return tensor
    low, high = tensor.aminmax()
    is_mask = (low == -torch.inf) & (high == 0)
    return torch.stack([low, high]).masked_fill(is_mask, 0)


def _no_longer_finite(looks: Sequence[_Now], numbers: Numbers) -> dict[str, Any]:
    data: dict[str, Any] = {}
    start = 0
    for now in looks:
        middle, end = start + now.firsts, start + now.firsts + len(now.names)
        first = np.isfinite(numbers[start:middle])[list(now.places)]
        lost = np.flatnonzero(first & ~np.isfinite(numbers[middle:end]))
        names = [now.names[i] for i in lost[:MOST_NAMES]]
        data[now.kind] = {"checked": int(first.sum()), "nonfinite": names, "count": len(lost)}
        if now.kind == "parameters":
            reach = float(numbers[middle:end][list(now.trained)].sum())
            data[now.kind]["reach"] = reach if np.isfinite(reach) else None
        start = end
    return data
