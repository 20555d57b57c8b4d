"""Every optimizer of torch.optim in every form it has: bit for bit what torch's scaler makes of it."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from torch import nn

from .twin import assert_lockstep, attempt, batches, loss_of, small_model, spoil, training

FORMS = ("foreach", "fused", "capturable")
OWN_LOOPS = ("LBFGS", "Muon", "SparseAdam")  # a closure, matrices only, sparse gradients only
CLASSES = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type)
    and issubclass(each, torch.optim.Optimizer)
    and each is not torch.optim.Optimizer
}
USUAL = {
    name: partial(each, **({"momentum": 0.9} if name == "SGD" else {}))
    for name, each in CLASSES.items()
    if name not in OWN_LOOPS
}
WITH_FORM = [
    (name, form)
    for name in USUAL
    for form in FORMS
    if form in inspect.signature(CLASSES[name].__init__).parameters
]


def test_the_list_is_torchs():
    assert set(CLASSES) >= {"ASGD", "Adafactor", "AdamW", "Adamax", "Rprop", *OWN_LOOPS}
    assert len(WITH_FORM) >= 20


@pytest.mark.parametrize("style", ["plain", "clip", "accumulate"])
@pytest.mark.parametrize("name", USUAL)
def test_default(name, style):
    assert_lockstep(training(USUAL[name], style=style))


@pytest.mark.parametrize(("name", "form"), WITH_FORM)
def test_forms(name, form):
    """Where a form does not exist on a CPU, it is refused in the same words."""
    assert_lockstep(training(partial(USUAL[name], **{form: True})))


@pytest.mark.parametrize("name", [name for name, form in WITH_FORM if form == "fused"])
def test_fused_after_an_explicit_unscale(name):
    assert_lockstep(training(partial(USUAL[name], fused=True), style="clip"))


@pytest.mark.parametrize("form", [None, "foreach", "fused"])
def test_a_learning_rate_that_is_a_tensor(form):
    make_optimizer = partial(torch.optim.Adam, **({form: True} if form else {}))
    lr = {"lr": torch.tensor(1e-2)} | ({"capturable": False} if form == "foreach" else {})
    assert_lockstep(training(partial(make_optimizer, **lr)))


def test_muon():
    def loop(make):
        model = small_model()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer, scaler = torch.optim.Muon(matrices), make(model)
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            spoil(matrices, step, {2: torch.inf})
            yield attempt(scaler, matrices, optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize("named", [True, False])
def test_lbfgs_and_its_closure(named):
    """torch refuses a closure by its name, and passes one on by its place."""

    def loop(make):
        model, (batch,) = small_model(), batches(1)
        optimizer, scaler = torch.optim.LBFGS(model.parameters(), max_iter=3), make(model, init_scale=1.0)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        scaler.scale(closure())
        result = scaler.step(optimizer, closure=closure) if named else scaler.step(optimizer, closure)
        scaler.update()
        yield float(result), [p.tolist() for p in model.parameters()]

    (seen,) = assert_lockstep(loop)
    assert (seen[0] is RuntimeError) == named


@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients(name):
    def loop(make):
        model = nn.Embedding(10, 4, sparse=True)
        optimizer, scaler = CLASSES[name](model.parameters(), lr=0.1), make(model, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([1, 1, 7])).square().sum()).backward()
            if step == 2:
                model.weight.grad._values()[0, 0] = torch.inf
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)
