"""Loops that are not the usual one: several optimizers, penalties, checkpoints, threads, replicas, compiled functions."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .twin import assert_lockstep, attempt, batches, bits, found_inf, loss_of, small_model, snapshot, spoil


def halves(model):
    """An optimizer for each half of a model; the second has a kernel of its own."""
    return torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[3].parameters(), fused=True)


@pytest.mark.parametrize("bad", [0, 1])
def test_several_optimizers_one_scaler(bad):
    def loop(make):
        model = small_model()
        optimizers, scaler = halves(model), make(model, growth_interval=2)
        for step, batch in enumerate(batches(6)):
            model.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            spoil(model[3 * bad].parameters(), step, {2: torch.inf})
            if step % 2:
                scaler.unscale_(optimizers[0])
            yield attempt(scaler, model.parameters(), *optimizers)

    assert_lockstep(loop)


def test_several_scalers():
    def loop(make):
        model = small_model()
        optimizers = halves(model)
        scalers = [make(model, growth_interval=2), make(model, init_scale=64.0)]
        for step, batch in enumerate(batches(6)):
            for scaler, optimizer in zip(scalers, optimizers, strict=True):
                model.zero_grad()
                scaler.scale(loss_of(model, batch)).backward()
                spoil(model[0].parameters(), step, {2: torch.inf})
                yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


def test_an_optimizer_that_changes_its_scaler():
    def loop(make):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in batches(4):
            scaler = make(model)
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize(
    "outputs",
    [
        lambda loss: [loss, loss * 2],
        lambda loss: (loss, [loss, (loss,)]),
        lambda loss: (part for part in (loss, loss * 3)),
        lambda loss: map(torch.neg, [loss, [loss]]),
        lambda loss: [loss.expand(3), loss.half()],
        lambda loss: [loss, (part for part in (loss, loss))],
        lambda loss: {"first": loss},
        lambda loss: {loss},
        lambda loss: [],
    ],
)
def test_several_losses(outputs):
    """Lazy ones come back as they are: not used up, and not read before their time."""

    def loop(make):
        weight = torch.ones((), requires_grad=True)
        scaled = make().scale(outputs(weight * 1.5))
        yield type(scaled)
        for part in scaled:
            yield part.tolist() if isinstance(part, torch.Tensor) else str(type(part))

    assert_lockstep(loop)


def test_a_lazy_loss_is_made_when_torch_makes_it():
    def loop(make):
        made = []

        def losses():
            for value in (1.0, 2.0):
                made.append(value)
                yield torch.tensor(value)

        scaled = make().scale(losses())
        yield list(made)
        yield float(next(scaled)), list(made)

    assert_lockstep(loop)


def test_retain_graph():
    def loop(make):
        model = small_model()
        optimizers, scaler = halves(model), make(model)
        for batch in batches(3):
            model.zero_grad()
            loss = loss_of(model, batch)
            scaler.scale(loss).backward(retain_graph=True)
            scaler.scale(loss.square()).backward()
            yield attempt(scaler, model.parameters(), *optimizers)

    assert_lockstep(loop)


def test_gradient_penalty():
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model)
        for batch in batches(3):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            penalty = sum((grad / scaler.get_scale()).square().sum() for grad in grads)
            scaler.scale(loss + penalty).backward()
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), make(model)
        for batch in batches(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                hidden = checkpoint(model[:3], batch.requires_grad_(), use_reentrant=reentrant)
                loss = model[3](hidden).float().square().mean()
            scaler.scale(loss).backward()
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


def test_data_parallel():
    """Of the CPU: the module itself."""

    def loop(make):
        model = nn.DataParallel(small_model())
        optimizer, scaler = torch.optim.AdamW(model.parameters()), make(model)
        for batch in batches(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


def in_threads(*works):
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_loop_in_another_thread_in_each_of_its_parts():
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model, growth_interval=2)
        for batch in batches(3):
            optimizer.zero_grad()
            in_threads(lambda batch=batch: scaler.scale(loss_of(model, batch)).backward())
            in_threads(partial(scaler.step, optimizer))
            in_threads(scaler.update)
            yield snapshot(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


def test_threads_with_a_scaler_each():
    def loop(make):
        models = [small_model() for _ in range(3)]
        ends = {}

        def train(model):
            optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model, growth_interval=2)
            for step, batch in enumerate(batches(6)):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, batch)).backward()
                spoil(model.parameters(), step, {2: torch.inf})
                ends[id(model)] = attempt(scaler, model.parameters(), optimizer)

        in_threads(*(partial(train, model) for model in models))
        yield [ends[id(model)] for model in models]

    assert_lockstep(loop)


def test_losses_scaled_by_several_threads_at_once():
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model)
        scaler.scale(torch.ones(()))  # torch makes the tensor of the scale at the first call, and not twice
        for batch in batches(2):
            losses = [loss_of(model, batch) for _ in range(4)]
            scaled = {}

            def scale(i, losses=losses, scaled=scaled):
                scaled[i] = scaler.scale(losses[i])

            in_threads(*(partial(scale, i) for i in range(4)))
            optimizer.zero_grad()
            for i in sorted(scaled):
                scaled[i].backward()
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(whole):
    """The forward pass and scale() in one graph, or the step of the optimizer too."""
    torch._dynamo.reset()

    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model)

        def backward(batch):
            scaler.scale(model(batch).square().mean()).backward()
            if whole:
                scaler.step(optimizer)
                scaler.update()

        compiled = torch.compile(backward, backend="eager")
        for batch in batches(2):
            optimizer.zero_grad()
            compiled(batch)
            if not whole:
                scaler.step(optimizer)
                flags = found_inf(scaler, optimizer)
                scaler.update()
                yield flags
            yield snapshot(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


def test_steps_hooks_and_what_a_step_returns():
    def loop(make):
        model, seen = small_model(), []
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for step, batch in enumerate(batches(2)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            spoil(model.parameters(), step, {0: torch.nan})
            yield scaler.step(optimizer), list(seen), len(optimizer._optimizer_step_pre_hooks)
            scaler.update()

    assert_lockstep(loop)


class Imitation:
    """An optimizer that has no more than torch's scaler asks for."""

    def __init__(self, optimizer):
        self.param_groups, self.step = optimizer.param_groups, optimizer.step


def test_an_imitation_of_an_optimizer():
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), make(model, growth_interval=2)
        imitation = Imitation(optimizer)
        for step, batch in enumerate(batches(5)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            spoil(model.parameters(), step, {2: torch.inf})
            scaler.step(imitation)
            scaler.update()
            yield snapshot(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize("inside", [{0}, {1}])
def test_steps_in_inference_mode(inside):
    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model)
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            with torch.inference_mode(step in inside):
                yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


@pytest.mark.parametrize(
    "scaled",
    [
        lambda scale, x: torch.func.vmap(scale)(x),
        lambda scale, x: torch.func.grad(lambda y: scale(y.square().sum()))(x),
        lambda scale, x: torch.func.vmap(torch.func.grad(lambda y: scale(y * y)))(x),
        lambda scale, x: torch.func.jvp(scale, (x,), (x,))[1],
        lambda scale, x: torch.func.functionalize(scale)(x.sum()),
        lambda scale, x: scale(x.sum().to_sparse()),
    ],
)
def test_losses_of_other_kinds(scaled):
    """Inside of functions that `torch.func` transforms, and a sparse one."""

    def loop(make):
        parameter, scaler = torch.nn.Parameter(torch.ones(3)), make()
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(2):
            scaler.scale(torch.ones(()))
            yield bits(scaled(scaler.scale, torch.arange(3.0)))
            parameter.grad = torch.ones(3)
            yield attempt(scaler, [parameter], optimizer)

    assert_lockstep(loop)


class Returning(torch.optim.SGD):
    def step(self, closure=None, *, twice=False):
        for _ in range(1 + twice):
            super().step(closure)
        return 7.0


class Scaling(torch.optim.SGD):
    """As an optimizer of others that unscales by itself."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        found = grad_scaler._check_inf_per_device(self)
        scale = grad_scaler._get_scale_async()
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(scale)
        if not any(bool(flag) for flag in found.values()):
            super().step(closure)


@pytest.mark.parametrize("cls", [Returning, Scaling])
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_optimizers_of_others(cls):
    def loop(make):
        model = small_model()
        optimizer, scaler = cls(model.parameters(), lr=0.1), make(model, growth_interval=2)
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            spoil(model.parameters(), step, {2: torch.inf})
            yield scaler.step(optimizer, **({"twice": True} if cls is Returning else {}))
            scaler.update()
            yield snapshot(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)
