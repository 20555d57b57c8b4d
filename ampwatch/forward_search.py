"""Where a forward pass leaves the finite numbers: every module's inputs and outputs, for one pass.

The module that is looked for is the *innermost one with finite inputs and a non-finite output*. Attention scores
that overflow inside a module without a module of their own name that module, and not the one behind it that was
handed the NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .hooks import Hook, Numbers, Observation, Observer, gathered, is_plain, magnitudes, tensors_in
from .stats.layout import SCALARS
from .stats.reference import statistics

MOST_CALLS: Final = 4096  # of modules in one pass; a recurrent model may loop for long
MOST_IN_PATH: Final = 8
_COLUMNS: Final = SCALARS[: SCALARS.index("max_abs") + 1]


@dataclass
class _Call:
    """One call of a module. `inputs` and `outputs` say which measured tensors are its own."""

    module: str
    module_type: str
    parent: _Call | None
    inputs: range
    outputs: range | None = None  # None until it has returned


class ForwardSearch(Observer):
    """Watches all modules of a model through its next forward pass; event `forward_search`.

    The pass ends with the call of the model itself, so that what checkpointing runs again in backward does not
    count. Each tensor that goes into or comes out of a module costs one statistics pass. One thread is followed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._forget()

    def collect(self) -> Observation | None:
        """What was seen so far, None if no module has returned."""
        if not self._returned:
            return None
        values = gathered([self._parameters_finite, *self._rows])
        return Observation(
            "forward_search", values, partial(_decode, tuple(self._returned), tuple(self._may_be_mask))
        )

    def _forget(self) -> None:
        self._stack: list[_Call] = []
        self._returned: list[_Call] = []
        self._rows: list[Tensor] = []
        self._may_be_mask: list[bool] = []
        self._parameters_finite = torch.empty(0)
        self._calls = 0
        self._thread: int | None = None
        self._done = False

    def _attach(self) -> Iterator[RemovableHandle]:
        for name, module in self._model.named_modules():
            enter = Hook("observers.ForwardSearch", partial(self._enter, name))
            leave = Hook("observers.ForwardSearch", partial(self._leave, name))
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, with_kwargs=True)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._done or self._calls == MOST_CALLS or not self._follows_this_thread():
            return
        if not self._calls:
            self._parameters_finite = (
                magnitudes(list(filter(is_plain, self._model.parameters()))).isfinite().all()
            )
        self._calls += 1
        parent = self._stack[-1] if self._stack else None
        self._stack.append(_Call(name, type(module).__name__, parent, self._measure((args, kwargs))))

    def _leave(self, name: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if self._done or not self._follows_this_thread() or name not in [call.module for call in self._stack]:
            return
        call = self._stack.pop()
        while call.module != name:  # one that raised, and was caught, never returned
            call = self._stack.pop()
        call.outputs = self._measure(output)
        self._returned.append(call)
        self._done = name == ""

    def _follows_this_thread(self) -> bool:
        """DataParallel calls copies of the modules, with their hooks, in threads of their own."""
        self._thread = self._thread or get_ident()
        return self._thread == get_ident()

    def _measure(self, value: Any) -> range:
        start = len(self._rows)
        for tensor in tensors_in(value):
            self._rows.append(statistics(tensor).narrow(0, 0, len(_COLUMNS)))
            self._may_be_mask.append(not tensor.requires_grad)
        return range(start, len(self._rows))


@dataclass(frozen=True)
class _Range:
    """The numbers of several tensors: how many there are, and how far they reach."""

    n_inf: int
    n_nan: int
    masked: int  # those of n_inf that an attention mask of 0 and -inf holds on purpose
    max_abs: float | None  # over finite elements; None where there is no tensor

    @property
    def finite(self) -> bool:
        return self.n_inf + self.n_nan == self.masked


@dataclass(frozen=True)
class _Seen:
    """A call with its numbers."""

    call: _Call
    inputs: _Range
    outputs: _Range


def _decode(returned: Sequence[_Call], may_be_mask: Sequence[bool], numbers: Numbers) -> dict[str, Any]:
    rows = [dict(zip(_COLUMNS, row, strict=True)) for row in numbers[1:].reshape(-1, len(_COLUMNS)).tolist()]
    masked = [_masked(row) if may_be else 0 for row, may_be in zip(rows, may_be_mask, strict=True)]

    def range_of(tensors: range) -> _Range:
        return _Range(
            n_inf=int(sum(rows[i]["n_inf"] for i in tensors)),
            n_nan=int(sum(rows[i]["n_nan"] for i in tensors)),
            masked=sum(masked[i] for i in tensors),
            max_abs=max((rows[i]["max_abs"] for i in tensors), default=None),
        )

    seen = [_Seen(call, range_of(call.inputs), range_of(call.outputs or range(0))) for call in returned]
    whole = [each for each in seen if each.call.parent is None]
    origin = _origin(seen)
    return {
        "origin": None if origin is None else _described(origin, seen),
        "path": [_described(each, seen) for each in seen if not each.outputs.finite][:MOST_IN_PATH],
        "inputs_finite": all(each.inputs.finite for each in whole),
        "outputs_finite": all(each.outputs.finite for each in whole),
        "parameters_finite": bool(numbers[0]),
    }


def _masked(row: dict[str, float]) -> int:
    """Infinite elements of an additive mask: it holds nothing but them and zeros."""
    return int(row["n_inf"]) if row["n_zero"] + row["n_inf"] == row["numel"] else 0


def _origin(seen: Sequence[_Seen]) -> _Seen | None:
    """The first to return a non-finite output for finite inputs: what it calls returns before it does.

    Only what reaches the outermost module counts. Scores masked with -inf by a module of their own are finite again
    after the softmax.
    """
    bad = {id(each.call) for each in seen if not each.outputs.finite}
    return next((each for each in seen if each.inputs.finite and _reaches_out(each.call, bad)), None)


def _reaches_out(call: _Call | None, bad: set[int]) -> bool:
    while call is not None:
        if call.outputs is not None and id(call) not in bad:
            return False
        call = call.parent
    return True


def _described(each: _Seen, seen: Sequence[_Seen]) -> dict[str, Any]:
    inside = [child.outputs.max_abs for child in seen if child.call.parent is each.call]
    return {
        "module": each.call.module,
        "module_type": each.call.module_type,
        "input_max_abs": each.inputs.max_abs,
        "input_n_nonfinite": each.inputs.n_inf + each.inputs.n_nan - each.inputs.masked,
        "output_n_inf": each.outputs.n_inf,
        "output_n_nan": each.outputs.n_nan,
        "output_max_abs": each.outputs.max_abs,
        "children_max_abs": max((x for x in inside if x is not None), default=None),
    }
