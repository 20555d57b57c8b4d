"""Which operations between a model's outputs and the loss were computed in float16, read off the graph of autograd."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

MOST_NODES: Final = 512
MOST_NAMED: Final = 16
_MOVES: Final = (  # hand numbers on as they are
    *("View", "UnsafeView", "Reshape", "Alias", "Clone", "ToCopy", "Expand", "Select", "Slice", "Split"),
    *("Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "Index", "Gather", "Cat", "Stack", "Unbind"),
)


class LossPath(NamedTuple):
    """From the loss back to the outputs of modules that it was made of.

    Arguments:
        outputs: the nodes at which the walk ended; empty if it met none, and then nothing is known.
        float16: names of the operations on the way whose result is float16, such as `Log` or `Mean`, nearest the
            loss first; at most 16.
    """

    outputs: list[Any]
    float16: list[str]


def loss_path(losses: Sequence[Tensor], outputs: Collection[Any]) -> LossPath:
    """Walk the graph from the losses to the nodes that made outputs of modules, over 512 nodes at most.

    Synchronisation: none; no saved tensor is touched.
    """
    waiting: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(waiting)
    reached: list[Any] = []
    float16: list[str] = []
    while waiting and len(seen) <= MOST_NODES:
        node = waiting.pop(0)
        if node in outputs:
            reached.append(node)
            continue
        if _is_float16(node) and (name := _name(node)) not in (*float16, *_MOVES):
            float16.append(name)
        new = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(new)
        waiting += new
    if waiting or not reached:
        return LossPath([], [])
    return LossPath(reached, float16[:MOST_NAMED])


def _is_float16(node: Any) -> bool:
    """Whether the operation's result is float16."""
    return any(each.dtype is torch.float16 for each in getattr(node, "_input_metadata", ()))


def _name(node: Any) -> str:
    name: str = node.name()
    return name.partition("Backward")[0]
