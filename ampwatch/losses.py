"""The losses of a window as one number, however many there are: a window may never end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch._C import _functorch as functorch


class Losses:
    """Sum and count of the losses handed to scale(), on one device. Nothing synchronises."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, losses: Iterable[Tensor], device: torch.device) -> None:
        """Add each as it is now, by its mean: the user may change the tensor in place.

        Arguments:
            losses: of any shape, dtype and device; those that are empty, complex or sparse have no value. Of what
                `torch.func` works on it is the mean over what it is mapped over.
            device: where they are summed; the same for all calls.
        """
        for loss in map(_unwrapped, losses):
            if loss.numel() and not loss.is_complex() and loss.layout is torch.strided:
                value = _mean(loss, device)
                # Not in place: what inference mode has made could not be added to outside of it. And inside of
                # functionalize() whatever is made is wrapped.
                self._sum = _unwrapped(value if self._sum is None else self._sum + value)
                self._count += 1

    @property
    def is_known(self) -> bool:
        """Whether any has a value."""
        return self._count > 0

    def mean(self) -> Tensor | None:
        """Scalar, float64; NaN and inf as they come. None if no loss had a value."""
        return self._sum if self._sum is None or self._count == 1 else self._sum / self._count


def loss_in(output: object) -> Tensor | None:
    """The loss in what a model answers, as those of Transformers do: `output.loss` or `output["loss"]`, to be trained by."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None


def _unwrapped(loss: Tensor) -> Tensor:
    """The tensor inside of those of `torch.func`, which cannot be used once its functions have returned."""
    while functorch.is_functorch_wrapped_tensor(loss):
        loss = functorch.get_unwrapped(loss)
    return loss


def _mean(loss: Tensor, device: torch.device) -> Tensor:
    copy = loss.detach().to(device, torch.float64, copy=True, non_blocking=True)
    return copy.reshape(()) if copy.numel() == 1 else copy.mean()
