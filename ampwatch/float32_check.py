"""A module that makes NaN of finite inputs, computed once more in float32: is it the range, or the device?

    check = Float32Check(model, "stem")
    check.arm()
    ...                      # forward
    check.collect()          # an Observation

Only layers that are a pure function of inputs and weights are computed again: no buffer is written, no random number
is drawn, no hook is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .hooks import Hook, Numbers, Observation, Observer, gathered, in_backward, is_plain, magnitudes

CHECKABLE: Final = frozenset(("Linear", "Conv1d", "Conv2d", "Conv3d"))
_TYPES: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NAMES: Final = ("output_n_nan", "output_numel", "float32_max_abs", "input_max_abs", "weight_max_abs")


class Float32Check(Observer):
    """Computes one module once more in float32, without gradients; event `float32_check`. Nothing synchronises."""

    def __init__(self, model: nn.Module, module: str) -> None:
        super().__init__()
        self._name = module
        self._module = model.get_submodule(module)
        self._seen: Tensor | None = None

    def collect(self) -> Observation | None:
        """What was seen so far, None if nothing was."""
        if self._seen is None:
            return None
        named = {"module": self._name, "module_type": type(self._module).__name__}
        return Observation("float32_check", self._seen, partial(_told, named))

    def _forget(self) -> None:
        self._seen = None

    def _attach(self) -> Iterator[RemovableHandle]:
        if type(self._module) in _TYPES:
            yield self._module.register_forward_hook(Hook("observers.Float32Check", self._look))

    @torch.no_grad()
    def _look(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        plain = len(args) == 1 and all(isinstance(t, Tensor) and is_plain(t) for t in (*args, output))
        if self._seen is not None or not plain or in_backward():
            return
        weight: Tensor = module.weight  # type: ignore[assignment]
        with torch.autocast(args[0].device.type, enabled=False):
            again = _in_float32(module, args[0])
        counts = [output.isnan().sum(), torch.tensor(output.numel(), device=output.device)]
        self._seen = gathered([*counts, magnitudes([again]), magnitudes([args[0], weight])])


def _in_float32(module: Any, x: Tensor) -> Tensor:
    weight, bias = module.weight.float(), None if module.bias is None else module.bias.float()
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x.float(), weight, bias)
    computed: Tensor = module._conv_forward(x.float(), weight, bias)
    return computed


def _told(named: dict[str, str], numbers: Numbers) -> dict[str, Any]:
    return named | dict(zip(_NAMES, numbers.tolist(), strict=True))
