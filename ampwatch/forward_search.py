"""Where a forward pass leaves the finite numbers: what goes into and comes out of every module, for one attempt.

    search = ForwardSearch(model)
    search.arm()
    ...                      # forward
    search.pass_ended()      # a loss was scaled; and so on for each micro-batch
    search.disarm()
    search.collect()         # an Observation that tells of the first pass whose outputs are not finite

A *pass* is what runs from one loss to the next, however many modules are called from outside for it: a model as a
whole, or its parts one after another. What runs without gradients, such as an evaluation, is none; nor is what
checkpointing calls again in backward. What the numbers say is told by forward_origin.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn

from .forward_origin import COLUMNS, STATISTICS, Call, Trace, told
from .hooks import (
    Handle,
    Hook,
    Observation,
    Observer,
    after_forward,
    before_forward,
    gathered,
    in_backward,
    is_plain,
    magnitudes,
    takes_hooks,
    tensors_in,
)
from .names import modules_of
from .stats.reference import statistics

MOST_TENSORS: Final = 8192  # measured in one pass; a recurrent model may loop for long
MOST_TRACES: Final = 8  # passes of different calls that are kept apart
_AT: Final = {name: i for i, name in enumerate(COLUMNS)}


@dataclass
class _Entered:
    """A module that has been called and has not returned yet."""

    number: int
    module: str
    inputs: range


@dataclass
class _Pass:
    """A pass, or several of the same calls: the first of them whose outputs are not finite, else the first."""

    trace: Trace
    values: Tensor
    is_broken: Tensor  # a bool on the device

    def merge(self, later: _Pass) -> None:
        """Take the later pass of the same calls in place of this one, unless this one is broken."""
        self.values = torch.where(self.is_broken, self.values, later.values)
        self.is_broken = self.is_broken | later.is_broken


class ForwardSearch(Observer):
    """Watches all modules of a model until it is disarmed; event `forward_search`.

    Each tensor that goes into or comes out of a module costs one statistics pass. Memory is bounded: passes of the
    same calls, as micro-batches are, share one record. One thread is followed. Nothing synchronises.
    """

    event = "forward_search"

    _parameters_finite: Tensor  # at the first call

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._forget()

    def restart(self) -> None:
        """Forget what was seen, and go on looking."""
        self._forget()

    @torch.no_grad()
    def pass_ended(self) -> None:
        """A loss was scaled: what is called from now on belongs to the next pass."""
        if self._returned:
            self._keep(self._pass())
        self._begin_pass()

    def collect(self) -> Observation | None:
        """What was seen so far, None if no module has returned."""
        self.pass_ended()
        if not self._passes:
            return None
        values = gathered([self._parameters_finite, *(each.values for each in self._passes)])
        return Observation("forward_search", values, partial(told, [each.trace for each in self._passes]))

    def _forget(self) -> None:
        self._passes: list[_Pass] = []
        self._thread: int | None = None
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._stack: list[_Entered] = []
        self._returned: list[Call] = []
        self._rows: list[Tensor] = []
        self._numbers = 0
        self._is_first_call = True

    def _attach(self) -> Iterator[Handle]:
        seen = ((name, each) for name, each in modules_of(self._model) if takes_hooks(each))
        for name, module in seen:
            enter = Hook("observers.ForwardSearch", partial(self._enter, name))
            leave = Hook("observers.ForwardSearch", partial(self._leave, name))
            yield before_forward(module, enter, with_kwargs=True)
            yield after_forward(module, leave, with_kwargs=True)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if len(self._rows) >= MOST_TENSORS or in_backward() or not self._follows_this_thread():
            return
        if not self._stack and not torch.is_grad_enabled():
            if (
                module.training and not self._numbers
            ):  # a generator may feed a critic so, an evaluation feeds nothing
                self._is_first_call = False
            return
        if not (self._passes or self._numbers):
            parameters = list(filter(is_plain, self._model.parameters()))
            self._parameters_finite = magnitudes(parameters).isfinite().all()
        self._stack.append(_Entered(self._numbers, name, self._measure((args, kwargs))))
        self._numbers += 1

    def _leave(self, name: str, module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if get_ident() != self._thread or name not in [call.module for call in self._stack]:
            return
        call = self._stack.pop()
        while call.module != name:  # one that raised, and was caught: what it had called came to nothing
            self._returned = [each for each in self._returned if each.number < call.number]
            call = self._stack.pop()
        parent = self._stack[-1].number if self._stack else -1
        outputs = self._measure(output)
        self._returned.append(Call(call.number, parent, name, type(module).__name__, call.inputs, outputs))

    def _follows_this_thread(self) -> bool:
        """DataParallel calls copies of the modules, with their hooks, in threads of their own."""
        self._thread = self._thread or get_ident()
        return self._thread == get_ident()

    def _measure(self, value: Any) -> range:
        start = len(self._rows)
        for tensor in tensors_in(value):
            kept = statistics(tensor).narrow(0, 0, len(STATISTICS))
            self._rows.append(torch.cat([kept, _is_mask(tensor).to(kept.dtype).reshape(1)]))
        return range(start, len(self._rows))

    def _pass(self) -> _Pass:
        trace = Trace(tuple(self._returned), len(self._rows), self._is_first_call)
        returned = [i for call in trace.outermost for i in call.outputs]
        bad = [_n_nonfinite(self._rows[i]) for i in returned]
        values = gathered(self._rows)
        return _Pass(trace, values, gathered([values.new_zeros(1), *bad]).sum() > 0)

    def _keep(self, ended: _Pass) -> None:
        same = next((each for each in self._passes if each.trace == ended.trace), None)
        if same is not None:
            same.merge(ended)
        elif len(self._passes) < MOST_TRACES:
            self._passes.append(ended)


def _is_mask(tensor: Tensor) -> Tensor:
    """A bool on the device: whether a tensor is an additive mask. It needs no gradient, and its maximum is 0.

    So it may hold 0, a constant such as -1e4, and -inf, but neither +inf nor NaN.
    """
    if tensor.requires_grad or tensor.is_complex() or not tensor.numel():
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    return tensor.detach().amax() == 0


def _n_nonfinite(row: Tensor) -> Tensor:
    """Inf and NaN elements, but those of an additive mask."""
    n_inf, n_nan, is_mask = (row.select(0, _AT[name]) for name in ("n_inf", "n_nan", "is_mask"))
    return n_nan + n_inf * (1 - is_mask)
