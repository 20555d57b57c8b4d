"""Losses of the models that read sentences."""

from torch import Tensor, nn
from torch.nn import functional as F

from .lab import half
from .models import sentences


def language(model: nn.Module, batch: int = 8) -> Tensor:
    tokens = sentences(batch)
    with half():
        return F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def tagging(model: nn.Module, batch: int = 8) -> Tensor:
    tokens = sentences(batch)
    with half():
        return F.cross_entropy(model(tokens).float().flatten(0, 1), (tokens % 4).flatten())
