"""A module that makes NaN of finite inputs, computed once more in float32: is it the range, or the device?

    check = Float32Check(model, "stem")
    check.arm()
    ...                      # forward
    check.collect()          # an Observation

A copy of the module is computed, and the random numbers that it draws are drawn again: nothing of the training is
touched. Only modules without modules inside, of one tensor, are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from .hooks import (
    Handle,
    Hook,
    Numbers,
    Observation,
    Observer,
    after_forward,
    gathered,
    in_backward,
    is_plain,
    magnitudes,
)
from .names import modules_of

_NAMES: Final = ("output_n_nan", "output_numel", "float32_max_abs", "input_max_abs", "weight_max_abs")


class Float32Check(Observer):
    """Computes one module once more in float32, without gradients; event `float32_check`. Nothing synchronises."""

    event = "float32_check"

    def __init__(self, model: nn.Module, module: str) -> None:
        super().__init__()
        self._name = module
        self._module = dict(modules_of(model))[module]
        self._seen: Tensor | None = None

    def collect(self) -> Observation | None:
        """What was seen so far, None if nothing was."""
        if self._seen is None:
            return None
        named = {"module": self._name, "module_type": type(self._module).__name__}
        return Observation("float32_check", self._seen, partial(_told, named))

    def _forget(self) -> None:
        self._seen = None

    def _attach(self) -> Iterator[Handle]:
        if next(self._module.children(), None) is None:
            yield after_forward(self._module, Hook("observers.Float32Check", self._look))

    @torch.no_grad()
    def _look(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        plain = len(args) == 1 and all(isinstance(t, Tensor) and is_plain(t) for t in (*args, output))
        if self._seen is not None or not plain or in_backward():
            return
        again = _in_float32(module, args[0])
        if isinstance(again, Tensor) and is_plain(again):
            counts = [output.isnan().sum(), output.new_full((), output.numel(), dtype=torch.float64)]
            largest = magnitudes([again]), magnitudes([args[0]]), _largest(module, args[0])
            self._seen = gathered([*counts, *largest])


def _in_float32(module: nn.Module, x: Tensor) -> Any:
    """What a copy of the module makes of its input; without its hooks."""
    device = x.device.type
    with (
        torch.autocast(device, enabled=False),
        torch.random.fork_rng([x.device] if device == "cuda" else []),
    ):
        again = copy.deepcopy(module).float()
        return type(again).forward(again, x.float())


def _largest(module: nn.Module, x: Tensor) -> Tensor:
    """Magnitude of the weights; 0 without any."""
    weights = [p for p in module.parameters() if is_plain(p)]
    return magnitudes(weights).max() if weights else x.new_zeros((), dtype=torch.float32)


def _told(named: dict[str, str], numbers: Numbers) -> dict[str, Any]:
    return named | dict(zip(_NAMES, numbers.tolist(), strict=True))
