"""The operations of a forward pass that are no modules: those that make the loss, and every softmax.

A loss written out in the training loop, and attention scores that are all masked, stand behind no module whose
inputs and outputs would show them. The loss is traced back through the graph of autograd (loss_path.py), and each
softmax is looked at as it runs (softmax_rows.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from threading import get_ident
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .hooks import (
    Handle,
    Hook,
    Numbers,
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
from .loss_path import loss_path
from .names import modules_of
from .softmax_rows import SoftmaxRows, first_bad

MOST_OUTPUTS: Final = 4096  # of modules, in one pass
MOST_PASSES: Final = 8


class _Loss(NamedTuple):
    """The loss of one pass: what it was made by, and on the device whether it and what it was made of are finite."""

    float16: list[str]
    known: bool
    finite: Tensor  # (2,) loss, outputs of modules


class OperationSearch(Observer):
    """Watches losses and softmaxes until it is disarmed; event `operations`.

    While modules run it stands in torch's stack of dispatch modes, entered and left with the outermost module, also
    where that raises. One thread is followed. No synchronisation.
    """

    event = "operations"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._outputs: dict[Any, Tensor] = {}  # by the node that made them: whether they are finite
        self._forget()

    def restart(self) -> None:
        """Forget what was seen, and go on looking; between two passes."""
        self._forget()

    @torch.no_grad()
    def pass_ended(self, losses: Sequence[Tensor]) -> None:
        """These losses are being scaled: what runs from now on belongs to the next pass."""
        outputs = self._outputs
        self._outputs = {}
        real = [loss for loss in losses if is_plain(loss)]
        if not outputs or not real or len(self._losses) == MOST_PASSES:
            return
        path = loss_path(real, outputs)
        reached = [outputs[node] for node in path.outputs] or [torch.tensor(True)]
        finite = [magnitudes(real).isfinite().all(), gathered(reached).all()]
        self._losses.append(_Loss(path.float16, bool(path.outputs), gathered(finite)))

    def collect(self) -> Observation | None:
        """What was seen so far, None if no loss was."""
        if not self._losses:
            return None
        values = gathered([*(loss.finite for loss in self._losses), *self._rows.counts])
        losses = [(loss.float16, loss.known) for loss in self._losses]
        return Observation(
            "operations", values, partial(_decode, losses, self._rows.modules, self._rows.rows)
        )

    def disarm(self) -> None:
        """Take all hooks off."""
        super().disarm()
        self._outputs = {}  # they hold on to the graph
        if (
            self._stack and _get_current_dispatch_mode() is self._rows
        ):  # the hook that should have left it has failed
            self._rows.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._stack.clear()

    def _forget(self) -> None:
        self._stack: list[str] = []
        self._outputs = {}
        self._losses: list[_Loss] = []
        self._rows = SoftmaxRows(lambda: self._stack[-1])
        self._thread: int | None = None

    def _attach(self) -> Iterator[Handle]:
        seen = ((name, each) for name, each in modules_of(self._model) if takes_hooks(each))
        for name, module in seen:
            enter = Hook("observers.OperationSearch", partial(self._enter, name))
            leave = Hook("observers.OperationSearch", partial(self._leave, name))
            yield before_forward(module, enter)
            yield after_forward(module, leave, always_call=True)

    def _enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        if in_backward() or not self._follows_this_thread():
            return
        if not self._stack:
            self._rows.__enter__()  # type: ignore[no-untyped-call]
        self._stack.append(name)

    def _leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if in_backward() or not self._follows_this_thread() or name not in self._stack:
            return
        while self._stack.pop() != name:
            pass
        if not self._stack:
            self._rows.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for tensor in tensors_in(output):
            if tensor.ndim and tensor.grad_fn is not None and len(self._outputs) < MOST_OUTPUTS:
                self._outputs[tensor.grad_fn] = magnitudes([tensor.detach()]).isfinite()

    def _follows_this_thread(self) -> bool:
        """DataParallel calls copies of the modules, with their hooks, in threads of their own."""
        self._thread = self._thread or get_ident()
        return self._thread == get_ident()


def _decode(
    losses: Sequence[tuple[list[str], bool]], modules: Sequence[str], rows: Sequence[int], numbers: Numbers
) -> dict[str, Any]:
    finite = numbers[: 2 * len(losses)].reshape(-1, 2).astype(bool).tolist()
    told = [
        {"finite": loss, "inputs_finite": inputs if known else None, "float16": float16}
        for (float16, known), (loss, inputs) in zip(losses, finite, strict=True)
    ]
    broken = next((each for each in told if not each["finite"]), told[0])
    return {"loss": broken, "softmax": first_bad(modules, rows, numbers[2 * len(losses) :])}
