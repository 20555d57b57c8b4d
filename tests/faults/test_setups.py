"""What models and optimizers are before training: set-ups that are right and look odd, and faults that the static check
tells before the first step, and a recorded run at its first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from loops import above_info, features, half, mlp, recorded, regression
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import ampwatch

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Setup(NamedTuple):
    """A model, all optimizers that step it, and the loss of a step."""

    model: nn.Module
    optimizers: list[Optimizer]
    loss: Callable[[int], Tensor]


def regressing(model: nn.Module, *optimizers: Optimizer) -> Setup:
    return Setup(model, list(optimizers), lambda step: regression(model, step))


class Tied(nn.Module):
    """Words in and out by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


class LowRank(nn.Module):
    """A frozen float16 layer, and what is learned beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).half().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.half()) + self.up(self.down(x))


class Casting(nn.Module):
    """Computes in float16 without autocast, by casts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.half(), self.weight.half())


def tied() -> Setup:
    model = Tied()
    words = torch.arange(20)
    return Setup(model, [AdamW(model.parameters())], lambda _: F.cross_entropy(model(words).float(), words))


def groups() -> Setup:
    model = mlp()
    decayed, kept = {"params": [p for p in model.parameters() if p.ndim > 1]}, {"weight_decay": 0.0}
    return regressing(
        model, AdamW([decayed, {"params": [p for p in model.parameters() if p.ndim == 1]} | kept])
    )


def frozen_body() -> Setup:
    model = mlp()
    model[0].requires_grad_(False)
    return regressing(model, AdamW(model.parameters()))


def low_rank() -> Setup:
    model = nn.Sequential(LowRank(), nn.Linear(8, 1))
    return regressing(model, AdamW([p for p in model.parameters() if p.requires_grad]))


def all_of_low_rank() -> Setup:
    model = nn.Sequential(LowRank(), nn.Linear(8, 1))
    return regressing(model, AdamW(model.parameters()))


def centres() -> Setup:
    """The loss has parameters of its own, with an optimizer of their own."""
    model, centre = mlp(), nn.Parameter(torch.zeros(1))
    loss = lambda step: regression(model, step) + (model(features(step)).float() - centre).square().mean()  # noqa: E731
    return Setup(model, [AdamW(model.parameters()), SGD([centre], 1e-3)], loss)


def centres_together() -> Setup:
    """The same in one optimizer."""
    setup = centres()
    parameters = [p for o in setup.optimizers for group in o.param_groups for p in group["params"]]
    return setup._replace(optimizers=[AdamW(parameters)])


def casting() -> Setup:
    model = Casting()
    return regressing(model, SGD(model.parameters(), 1e-3))


def lazy() -> Setup:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    return regressing(model, SGD(model.parameters(), 1e-3))


def compiled() -> Setup:
    """The optimizer holds the parameters of the model inside."""
    model = mlp()
    return regressing(torch.compile(model, backend="eager"), AdamW(model.parameters()))


RIGHT = [
    tied,
    groups,
    frozen_body,
    low_rank,
    all_of_low_rank,
    centres,
    centres_together,
    casting,
    lazy,
    compiled,
]


def copied() -> Setup:
    model = mlp()
    return regressing(model, SGD(copy.deepcopy(model).parameters(), 1e-3))


def frozen() -> Setup:
    model = mlp().requires_grad_(False)
    return regressing(model, SGD(model.parameters(), 1e-3))


def shared() -> Setup:
    model = mlp()
    return regressing(model, SGD(model.parameters(), 1e-3), SGD(model[2].parameters(), 1e-3))


def halved() -> Setup:
    model = mlp().half()
    return Setup(model, [SGD(model.parameters(), 1e-3)], lambda s: model(features(s).half()).float().mean())


def half_head() -> Setup:
    model = mlp()
    model[2].half()
    return regressing(model, SGD(model.parameters(), 1e-3))


def complex_filter() -> Setup:
    model = mlp()
    model.filter = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def loss(step: int) -> Tensor:
        return regression(model, step) * model.filter.abs().float().mean()

    return Setup(model, [SGD(model.parameters(), 1e-3)], loss)


def closure() -> Setup:
    model = mlp()
    return regressing(model, torch.optim.LBFGS(model.parameters()))


WRONG = {
    copied: ("no_gradients", "error"),
    shared: ("shared_parameter", "error"),
    halved: ("low_precision_params", "error"),
    half_head: ("low_precision_params", "error"),
    complex_filter: ("low_precision_params", "error"),
    closure: ("call_order", "error"),
}


def checked(setup: Setup, **arguments) -> list[tuple[str, str]]:
    """(kind, severity) of what is told before training."""
    scaler = arguments.pop("scaler", torch.amp.GradScaler("cpu"))
    dtype = arguments.pop("dtype", torch.float16)
    return [(f.kind, f.severity) for f in ampwatch.check(setup.model, setup.optimizers, scaler, dtype)]


def run(directory, setup: Setup, steps: int = 4, **scaler_arguments) -> list[tuple[str, str]]:
    """(kind, severity) of what is told of a few recorded steps, or of as many as torch takes."""
    with recorded(directory) as make:
        scaler = make(model=setup.model, init_scale=2.0**8, **scaler_arguments)
        for step in range(steps):
            for optimizer in setup.optimizers:
                optimizer.zero_grad()
            with half():
                loss = setup.loss(step)
            scaler.scale(loss).backward()
            for optimizer in setup.optimizers:
                scaler.step(optimizer)
            scaler.update()
    return above_info(directory)


@pytest.mark.parametrize("setup", RIGHT, ids=lambda setup: setup.__name__)
def test_what_is_right_is_silent_before_training_and_in_it(tmp_path, setup):
    assert checked(setup()) == []
    assert run(tmp_path, setup()) == []


@pytest.mark.parametrize("setup", WRONG, ids=lambda setup: setup.__name__)
def test_what_is_wrong_is_told_before_training_and_at_its_first_step(tmp_path, setup):
    assert checked(setup()) == [WRONG[setup]]
    try:
        told = run(tmp_path, setup())
    except (AssertionError, ValueError, NotImplementedError, TypeError):  # torch refuses it
        told = above_info(tmp_path)
    assert told == [WRONG[setup]]


def test_an_optimizer_over_what_is_frozen():
    assert checked(frozen()) == [("no_gradients", "error")]


def test_a_layer_that_was_replaced_after_the_optimizer_was_made():
    setup = copied()._replace(model=(model := mlp()), optimizers=[SGD(model.parameters(), 1e-3)])
    model[2] = nn.Linear(16, 1)
    (finding,) = ampwatch.check(model, setup.optimizers, torch.amp.GradScaler("cpu"), torch.float16)
    assert (finding.kind, finding.severity, finding.tensor) == ("no_gradients", "warning", "2.weight")
    assert finding.headline.startswith("2 of 4 parameters of SGD are not the model's")
    setup.optimizers.append(SGD(model[2].parameters(), 1e-3))
    assert checked(setup._replace(model=model)) == []


@pytest.mark.parametrize(
    ("dtype", "scaler", "told"),
    [
        (torch.float16, None, [("missing_scaler", "error")]),
        (torch.float16, torch.amp.GradScaler("cpu", enabled=False), [("missing_scaler", "error")]),
        (torch.bfloat16, torch.amp.GradScaler("cpu"), [("useless_scaler", "warning")]),
        (torch.float32, torch.amp.GradScaler("cpu"), [("useless_scaler", "warning")]),
        (torch.bfloat16, None, []),
        (torch.bfloat16, torch.amp.GradScaler("cpu", enabled=False), []),
        (torch.float16, torch.amp.GradScaler("cpu"), []),
    ],
)
def test_the_dtype_of_autocast_against_the_scaler(dtype, scaler, told):
    assert checked(tied(), dtype=dtype, scaler=scaler) == told


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the scaler would be on")
def test_a_scaler_for_a_device_that_is_not_there():
    assert checked(tied(), scaler=torch.amp.GradScaler("cuda")) == [("missing_scaler", "error")]
    assert checked(tied(), scaler=torch.amp.GradScaler("cuda"), dtype=torch.bfloat16) == []


def test_without_a_scaler_nothing_is_divided_twice_and_no_closure_is_refused():
    assert checked(shared(), scaler=None, dtype=torch.bfloat16) == []
    assert checked(closure(), scaler=None, dtype=torch.bfloat16) == []


@pytest.mark.parametrize(
    ("body", "head", "told"),
    [
        (1e-8, 1e-4, []),
        (1e-4, 1e-8, [("epsilon_underflow", "fatal")]),
        (1e-8, 0.0, [("epsilon_underflow", "fatal")]),
    ],
)
def test_the_eps_that_counts_is_that_of_the_group_in_float16(body, head, told):
    model = mlp()
    model[2].half()
    groups = [{"params": model[0].parameters(), "eps": body}, {"params": model[2].parameters(), "eps": head}]
    setup = regressing(model, torch.optim.Adam(groups))
    assert checked(setup, scaler=None, dtype=None) == told
