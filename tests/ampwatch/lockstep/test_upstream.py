"""The cases of PyTorch's own tests of GradScaler, each as a test of ours with our scaler in its place.

The tests are ours; only what each of them is about is PyTorch's. Of its files test/test_torch.py (whose tests run on
the CPU too), test/test_cuda.py, test/test_cuda_multigpu.py, test/distributed/fsdp/test_fsdp_sharded_grad_scaler.py and
test/distributed/_composable/fsdp/test_fully_shard_grad_scaler.py, as they stood in 2025:

| theirs | here |
|---|---|
| test_grad_scaling_unscale | test_unscale_by_device_and_dtype |
| test_grad_scaling_update_scale | test_update_scale |
| test_grad_scaling_unscale_sparse | test_unscale_sparse |
| test_grad_scaling_state_dict | test_state_dict, and all of test_state.py |
| test_grad_scaler_pass_itself | test_the_scaler_passes_itself_to_an_optimizer_that_asks_for_it |
| test_grad_scaler_deprecated_warning | test_the_deprecated_class_warns_and_can_be_watched |
| test_grad_scale_will_not_overflow | test_the_scale_does_not_grow_to_infinity |
| test_params_invalidated_with_grads_invalidated_between_unscale_and_step, …_and_graph_partition | \
test_gradients_spoiled_after_unscale; the second differs in a setting of Inductor, which nothing here compiles with |
| test_grad_scaling_autocast, _foreach, _fused, test_grad_scaling_autocast_fused_optimizers | test_with_and_without_scaling |
| test_grad_scaling_clipping | test_clipping_of_scaled_gradients |
| test_grad_scaling_clipping_separate_unscale | test_clipping_after_unscale |
| test_grad_scaling_penalty | test_penalty |
| test_grad_scaling_accumulation | test_accumulation |
| test_grad_scaling_multiple | test_several_models_losses_and_optimizers |
| test_grad_scaling_scale | test_scale_of_nested_outputs |
| test_grad_scaler_with_preset_grad_scale | test_scales_that_an_optimizer_was_given_before |
| test_grad_scaling_device_as_key, test_grad_scaling_multigpu | two GPUs: not here; meta is the second device in test_parameters.py |
| test_graph_grad_scaling, test_graph_scaling_fused_optimizers | a CUDA graph: not here; what of ours runs while \
one is captured is in scaler/test_captured.py |
| TestAutocastMPS | an Apple GPU: not here |
| test_gradient_scaler (fully_shard, alone and with tensor parallelism) | test_ranks.py, on two ranks for their four GPUs |
| test_grad_scaling (sharded), test_scaling_unscaling_sparse, test_inf_gradients_skip_optim_step, \
test_sharded_grad_scaler_found_inf, test_fsdp_ddp_parity_with_grad_scaler | test_ranks.py |
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import ampwatch

from ..recorded import MemoryRecorder
from .twin import assert_lockstep, attempt, batches, bits, given, loss_of, make, small_model, spoil, training

KINDS = pytest.mark.parametrize("kind", ["torch", "ours", "in place"])


def unscaled(kind, *grads, inv_scale=0.25):
    """found_inf after these gradients went through `_unscale_grads_`, and what became of them."""
    scaler, parameters = make(kind), [nn.Parameter(torch.empty_like(g.to_dense())) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler.scale(torch.ones(()))
    found = scaler._unscale_grads_(optimizer, torch.full((1,), inv_scale), torch.zeros(1), True)
    return sum(flag.item() for flag in found.values()), [p.grad for p in parameters]


@KINDS
@pytest.mark.parametrize("bad", [None, 0, 3, 4, 5, 7])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_unscale_by_device_and_dtype(kind, bad, value):
    """Contiguous, transposed, and with gaps."""
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    grads = [torch.full((3, 2), 4.0, dtype=dtype) for dtype in dtypes]
    grads += [torch.full((3, 2), 4.0).t(), *(torch.full((3, 4), 4.0, dtype=dtype)[:, :2] for dtype in dtypes)]
    if bad is not None:
        grads[bad][0, 1] = value
    found, after = unscaled(kind, *grads)
    assert found == (bad is not None)
    assert [grad.float().eq(1).sum().item() for grad in after] == [6 - (i == bad) for i in range(9)]


@KINDS
def test_update_scale(kind):
    scaler, parameter = (
        make(kind, growth_interval=2, backoff_factor=0.25, init_scale=4.0),
        nn.Parameter(torch.ones(1)),
    )
    optimizer, path = torch.optim.SGD([parameter], lr=0.0), []
    for grad in (1.0, 1.0, math.inf):
        given(scaler, [parameter], [torch.tensor([grad])])
        scaler.step(optimizer)
        scaler.update()
        path.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert path == [(4.0, 1), (8.0, 0), (2.0, 0)]


@KINDS
@pytest.mark.parametrize(
    ("values", "dtype", "found"),
    [
        ([16.0, 32.0, 64.0], torch.float32, 0),
        ([16.0, math.inf, 64.0], torch.float32, 1),
        ([16.0, math.nan, 64.0], torch.float32, 1),
        ([16.0, 32.0, 64.0], torch.float16, 0),
        ([64000.0, 32.0, 64000.0], torch.float16, 1),
    ],
)
def test_unscale_sparse(kind, values, dtype, found):
    grad = torch.sparse_coo_tensor(
        [[0, 1, 0], [2, 0, 2]], torch.tensor(values, dtype=dtype), (2, 3), check_invariants=True
    )
    expected = (grad.to_dense() / 4).tolist()
    flag, (after,) = unscaled(kind, grad)
    assert flag == found
    if not found:
        assert after.to_dense().tolist() == expected


@KINDS
@pytest.mark.parametrize("used", [False, True])
def test_state_dict(kind, used):
    first = make(kind, init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    second = make(kind, init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    if used:
        second._lazy_init_scale_growth_tracker(torch.device("cpu"))
    first._init_growth_tracker = 5
    second.load_state_dict(first.state_dict())
    assert (second.get_scale(), second.get_growth_factor(), second.get_backoff_factor()) == (3.0, 4.0, 0.5)
    assert (second.get_growth_interval(), second._get_growth_tracker()) == (2, 5)


class Asking(torch.optim.Optimizer):
    """An optimizer that unscales for itself, by the scaler that it is given."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {})
        self.given = []

    def step(self, *, grad_scaler):
        self.given.append(grad_scaler)


@KINDS
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_the_scaler_passes_itself_to_an_optimizer_that_asks_for_it(kind):
    parameter, scaler = nn.Parameter(torch.ones(1)), make(kind)
    optimizer = Asking([parameter])
    given(scaler, [parameter], [torch.ones(1)])
    scaler.step(optimizer)
    assert optimizer.given == [scaler]


class Reading(torch.optim.Optimizer):
    """One that finds what it needs on itself, as torch's fused ones do."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {})
        self.given = []

    def step(self, closure=None):
        self.given.append((self.grad_scale.item(), self.found_inf.item()))


@KINDS
def test_the_scale_is_left_on_an_optimizer_that_does_not_ask(kind):
    parameter, scaler = nn.Parameter(torch.ones(1)), make(kind, init_scale=2.0)
    optimizer = Reading([parameter])
    for grad in (1.0, math.inf):
        given(scaler, [parameter], [torch.tensor([grad])])
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.given == [(2.0, 0.0), (2.0, 1.0)]
    assert not vars(optimizer).keys() & {"grad_scale", "found_inf"}


def test_the_deprecated_class_warns_and_can_be_watched():
    with pytest.warns(FutureWarning, match="GradScaler"):
        scaler = torch.cpu.amp.GradScaler()
    assert ampwatch.watch(scaler, recorder=MemoryRecorder()) is scaler
    assert scaler.scale(torch.ones(())).item() == 2.0**16


def test_the_scale_does_not_grow_to_infinity():
    arguments = {"growth_interval": 1, "growth_factor": 2.0**4, "init_scale": 1e38}
    assert_lockstep(training(torch.optim.Adam, **arguments))


@KINDS
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_spoiled_after_unscale(kind, fused):
    """What was finite when it was checked is applied, whatever became of it."""
    model = small_model()
    optimizer, scaler = (
        torch.optim.AdamW(model.parameters(), fused=fused),
        make(kind, model, init_scale=128.0),
    )
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    scaler.unscale_(optimizer)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad.fill_(math.inf if i % 2 else math.nan)
    scaler.step(optimizer)
    scaler.update()
    assert not any(parameter.isfinite().any() for parameter in model.parameters())


@KINDS
@pytest.mark.parametrize("form", ["foreach", "fused"])
@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_with_and_without_scaling(kind, form, make_optimizer):
    """In float32 a power of two as scale changes nothing at all; an overflow costs one step and halves the scale."""

    def trained(kind, **arguments):
        torch.manual_seed(0)
        model = small_model()
        optimizer = make_optimizer(model.parameters(), lr=0.1, **{form: True})
        scaler = make(kind, model, init_scale=128.0, **arguments)
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            spoil(model.parameters(), step, {2: math.inf} if scaler.is_enabled() else {})
            if step != 2 or scaler.is_enabled():
                scaler.step(optimizer)
            scaler.update()
        return [p.tolist() for p in model.parameters()], scaler.get_scale()

    (scaled, scale), (plain, _) = trained(kind), trained("torch", enabled=False)
    assert scale == 64.0
    torch.testing.assert_close([*map(torch.tensor, scaled)], [*map(torch.tensor, plain)])


ENABLED = pytest.mark.parametrize("enabled", [True, False])


def clipping(max_norm, *, unscale, enabled):
    def loop(make):
        model = small_model()
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), lr=1.0),
            make(model, init_scale=128.0, enabled=enabled),
        )
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            factor = 1.0 if unscale else scaler.get_scale()
            yield bits(nn.utils.clip_grad_norm_(model.parameters(), max_norm * factor))
            spoil(model.parameters(), step, {} if unscale else {2: math.inf})
            yield attempt(scaler, model.parameters(), optimizer)

    return loop


@ENABLED
def test_clipping_of_scaled_gradients(enabled):
    assert_lockstep(clipping(0.2, unscale=False, enabled=enabled))


@ENABLED
def test_clipping_after_unscale(enabled):
    assert_lockstep(clipping(0.2, unscale=True, enabled=enabled))


@ENABLED
def test_penalty(enabled):
    def loop(make):
        model = small_model()
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), lr=1.0),
            make(model, init_scale=128.0, enabled=enabled),
        )
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            norm = torch.stack([(grad / scaler.get_scale()).norm() for grad in grads]).norm()
            scaler.scale(loss + norm).backward()
            spoil(model.parameters(), step, {2: math.inf})
            yield attempt(scaler, model.parameters(), optimizer)

    assert_lockstep(loop)


@ENABLED
def test_accumulation(enabled):
    def loop(make):
        model = small_model()
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), lr=1.0),
            make(model, init_scale=128.0, enabled=enabled),
        )
        for step, batch in enumerate(batches(6)):
            scaler.scale(loss_of(model, batch) / 2).backward()
            if step % 2:
                yield attempt(scaler, model.parameters(), optimizer)
                optimizer.zero_grad()

    assert_lockstep(loop)


@ENABLED
def test_several_models_losses_and_optimizers(enabled):
    def loop(make):
        models = [small_model(), small_model()]
        parameters = [p for model in models for p in model.parameters()]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        scaler = make(init_scale=128.0, growth_interval=2, enabled=enabled)
        for step, batch in enumerate(batches(5)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, second = (model(batch).square().mean() for model in models)
            scaler.scale(0.3 * first + 0.7 * second).backward(retain_graph=True)
            scaler.scale(0.6 * first - 0.4 * second).backward()
            spoil(models[1].parameters(), step, {2: math.inf})
            scaler.unscale_(optimizers[0])
            yield attempt(scaler, parameters, *optimizers)

    assert_lockstep(loop)


@KINDS
def test_scale_of_nested_outputs(kind):
    scaler, one = make(kind, init_scale=2.0), torch.full((1,), 4.0)
    outputs = scaler.scale([one.clone(), [one.clone(), (one.clone(), one.clone())]])
    assert (outputs[0].item(), outputs[1][0].item(), [t.item() for t in outputs[1][1]]) == (
        8.0,
        8.0,
        [8.0, 8.0],
    )
    assert scaler._scale.device == one.device


def test_scales_that_an_optimizer_was_given_before():
    """A fused optimizer whose `grad_scale` somebody has set keeps to it, and torch refuses where it must."""

    def loop(make):
        model = small_model()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), make(model, init_scale=4.0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor([3.0]), torch.tensor([0.0])
        scaler.scale(loss_of(model, batches(1)[0])).backward()
        before = copy.deepcopy([p.grad for p in model.parameters()])
        scaler.step(optimizer)
        yield bits(before), bits([p.grad for p in model.parameters()]), bits(list(model.parameters()))
        yield hasattr(optimizer, "grad_scale"), hasattr(optimizer, "found_inf")
        scaler.update()

    assert_lockstep(loop)


@KINDS
def test_gradients_are_checked_before_any_loss_is_scaled(kind):
    """As test_scaling_unscaling_sparse does, by torch's own method."""
    parameter, scaler = nn.Parameter(torch.ones(2)), make(kind)
    parameter.grad = torch.tensor([4.0, math.inf])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    found = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(()), False)
    assert (found[parameter.device].item(), parameter.grad.tolist()) == (1.0, [2.0, math.inf])
