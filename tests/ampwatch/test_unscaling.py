"""The pass that unscales and takes statistics at once: torch's gradients, weights and flags, kernel or no kernel."""

from __future__ import annotations

import math
from functools import partial, wraps

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import ampwatch
from ampwatch import internals, watching
from ampwatch.guard import failures
from ampwatch.stats import cpu
from ampwatch.stats.choose import Statistics, choose
from ampwatch.stats.reference import statistics_of
from ampwatch.stats.touched import Touched

from .recorded import MemoryRecorder
from .recorded import scaler as watched

SCALE = 2.0**10

needs_library = pytest.mark.skipif(not cpu.available(), reason="the CPU kernel was not built")


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    failures.clear()


class Counted:
    """The CPU kernel: how many gradients each call was given, and failure at some calls."""

    def __init__(self, *failing):
        self.calls, self._failing = [], failing

    def __call__(self, grads, found_inf, inv_scale):
        self.calls.append(len(grads))
        if len(self.calls) in self._failing:
            raise ZeroDivisionError("no kernel today")
        return cpu.unscale_with_statistics_(grads, found_inf, inv_scale)


@pytest.fixture
def inject(monkeypatch):
    """Scalers made from now on use this kernel."""

    def use(kernel):
        statistics = Statistics("counted", statistics_of, kernel)
        monkeypatch.setattr(watching, "choose", lambda *_: statistics)
        return kernel

    return use


def bits(tensors):
    return [bytes(t.detach().contiguous().flatten().view(torch.uint8).numpy()) for t in tensors]


def everything(parameters, optimizer, scaler):
    """Weights, gradients, state and scale."""
    grads = [p.grad for p in parameters if p.grad is not None]
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return bits(parameters), bits(grads), bits(state), scaler.state_dict()


def gradients_of(shapes, step):
    """Scaled gradients, one of them with inf at the third attempt."""
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(shape, generator=generator) * SCALE for shape in shapes]
    if step == 2:
        grads[-1].view(-1)[0] = math.inf
    return grads


def train(scaler, make_optimizer, groups, give=None, steps=5):
    """Attempts on gradients that are given; what stands after each of them."""
    parameters = [p for group in groups for p in group]
    optimizer = make_optimizer([{"params": group} for group in groups])
    for step in range(steps):
        scaler.scale(torch.ones(()))
        for p, grad in zip(parameters, gradients_of([p.shape for p in parameters], step), strict=True):
            p.grad = (give or (lambda p, grad: grad.to(p.dtype)))(p, grad)
        scaler.step(optimizer)
        scaler.update()
        yield everything(parameters, optimizer, scaler)


def parameters(*shapes, dtypes=(torch.float32,)):
    return [nn.Parameter(torch.ones(s, dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]


def assert_kernel_runs(inject, make_optimizer, make_groups, give=None):
    """In lockstep with torch, by the kernel at every attempt."""
    kernel, recorder = inject(Counted()), MemoryRecorder()
    ours = list(train(watched(recorder, init_scale=SCALE), make_optimizer, make_groups(), give))
    plain = torch.amp.GradScaler("cpu", init_scale=SCALE)
    assert ours == list(train(plain, make_optimizer, make_groups(), give))
    assert (len(kernel.calls), recorder.description["statistics"]) == (5, "counted")
    assert recorder.column("found_inf") == [0, 0, 1, 0, 0]
    return kernel.calls


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = [
    sgd,
    partial(sgd, fused=True),
    *(
        partial(make, fused=fused)
        for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for fused in (False, True)
    ),
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_optimizers(make_optimizer, inject):
    assert_kernel_runs(inject, make_optimizer, lambda: [parameters((3, 5), 7)])


@pytest.mark.parametrize("make_optimizer", [sgd, torch.optim.AdamW])
def test_several_dtypes_in_one_optimizer(make_optimizer, inject):
    mixed = (torch.float32, torch.bfloat16, torch.float64)
    calls = assert_kernel_runs(inject, make_optimizer, lambda: [parameters(*[9] * 6, dtypes=mixed)])
    assert calls == [6] * 5


def test_300_tensors_and_an_empty_group(inject):
    calls = assert_kernel_runs(
        inject, sgd, lambda: [parameters(*range(1, 200)), [], parameters(*range(1, 102))]
    )
    assert calls == [300] * 5


def test_parameters_without_a_gradient(inject):
    def give(p, grad):
        return None if p.numel() == 4 else grad

    calls = assert_kernel_runs(inject, sgd, lambda: [parameters(4, 5, 4, 6)], give)
    assert calls == [2] * 5


def transposed(p, grad):
    return grad.t().contiguous().t()


def with_gaps(p, grad):
    wide = torch.zeros(*p.shape[:-1], 2 * p.shape[-1])
    wide[..., ::2] = grad
    return wide[..., ::2]


@pytest.mark.parametrize("give", [transposed, with_gaps])
def test_gradients_that_are_not_contiguous(give, inject):
    assert_kernel_runs(inject, sgd, lambda: [parameters((3, 5), (4, 4))], give)


def test_gradients_that_share_their_storage(inject):
    def bucket():
        flat = torch.empty(10)
        parts = {6: flat[:6], 4: flat[6:]}
        return lambda p, grad: parts[p.numel()].copy_(grad)

    assert_kernel_runs(inject, sgd, lambda: [parameters(6, 4)], bucket())


def test_one_gradient_of_two_parameters(inject):
    """torch unscales it twice."""
    shared = torch.empty(3)
    assert_kernel_runs(inject, sgd, lambda: [parameters(3, 3)], lambda p, grad: shared.copy_(grad))


def test_float16_parameters_of_a_fused_optimizer(inject):
    make_optimizer = partial(torch.optim.Adam, fused=True, eps=1e-3)
    assert_kernel_runs(inject, make_optimizer, lambda: [parameters(3, 5, dtypes=(torch.float16,))])


@pytest.mark.parametrize("failing", [1, 3])
def test_a_kernel_that_fails_once_is_given_up(failing, inject, monkeypatch, caplog):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    kernel, recorder = inject(Counted(failing)), MemoryRecorder()
    ours = list(train(watched(recorder, init_scale=SCALE), sgd, [parameters(3, 5)]))
    assert ours == list(train(torch.amp.GradScaler("cpu", init_scale=SCALE), sgd, [parameters(3, 5)]))
    assert (len(kernel.calls), failures.pop("stats.counted")) == (failing, 1)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "ampwatch: stats.counted failed: ZeroDivisionError('no kernel today'). Training goes on, "
        "statistics are taken by the reference."
    ]
    assert [fault["where"] for fault in recorder.data("fault")] == ["stats.counted"]
    assert (recorder.description["statistics"], recorder.column("numel")) == ("reference", [8] * 5)


def test_statistics_that_cannot_be_taken_at_all_leave_the_training_torchs(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(watching, "choose", lambda *_: Statistics("broken", broken, broken))
    monkeypatch.setattr("ampwatch.unscaling.choose", lambda *_: Statistics("reference", broken))
    recorder = MemoryRecorder()
    ours = list(train(watched(recorder, init_scale=SCALE), sgd, [parameters(3, 5)]))
    assert ours == list(train(torch.amp.GradScaler("cpu", init_scale=SCALE), sgd, [parameters(3, 5)]))
    assert recorder.column("found_inf") == [0, 0, 1, 0, 0]
    assert (failures.pop("stats.broken"), failures.pop("scaler.gradients")) == (1, 5)


def test_a_kernel_that_cannot_even_read_is_given_up(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(watching, "choose", lambda *_: Statistics("broken", broken, broken))
    recorder = MemoryRecorder()
    scaler = watched(recorder, init_scale=SCALE)
    scaler._unscale_grads_ = scaler._unscale_grads_  # of the instance's own, so torch's method runs
    list(train(scaler, sgd, [parameters(3, 5)]))
    assert (recorder.column("numel"), recorder.description["statistics"]) == ([8] * 5, "reference")
    assert failures.pop("stats.broken") == 1


def half_done(error):
    """A kernel that fails once it has unscaled the first half of its list."""

    def unscale(grads, found_inf, inv_scale):
        torch._amp_foreach_non_finite_check_and_unscale_(grads[: len(grads) // 2], found_inf, inv_scale)
        raise Touched(error)

    return unscale


def optimizer_with_gradients(*values):
    params = parameters(*[2] * len(values))
    for p, value in zip(params, values, strict=True):
        p.grad = torch.full((2,), value)
    return torch.optim.SGD(params, lr=1.0), params


def test_a_kernel_that_fails_half_way_costs_a_step(inject, monkeypatch, caplog):
    """The weights stand, the scale backs off, and what was divided is not divided again."""
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    inject(half_done(ZeroDivisionError("late")))
    recorder, (optimizer, params) = MemoryRecorder(), optimizer_with_gradients(8.0, 8.0)
    scaler = watched(recorder, init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert [p.tolist() for p in params] == [[1.0, 1.0]] * 2
    assert ([p.grad[0].item() for p in params], scaler.get_scale()) == ([2.0, 8.0], 2.0)
    assert (recorder.column("found_inf"), recorder.column("skipped")) == ([1], [1])
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "ampwatch: stats.counted failed: Touched(ZeroDivisionError('late')). Training goes on, this step is skipped, "
        "then statistics are taken by the reference."
    ]
    assert (failures.pop("stats.counted"), recorder.description["statistics"]) == (1, "reference")


def test_after_a_kernel_failed_half_way_training_is_that_after_a_skip(inject, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    inject(half_done(ZeroDivisionError("late")))

    def final(scaler, first):
        optimizer, params = optimizer_with_gradients(first, 8.0)
        for _ in range(3):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            for p in params:
                p.grad = torch.full((2,), 8.0)
        return bits(params), scaler.state_dict()

    skipped = final(torch.amp.GradScaler("cpu", init_scale=4.0), math.inf)
    assert final(watched(MemoryRecorder(), init_scale=4.0), 8.0) == skipped
    assert failures.pop("stats.counted") == 1


def test_in_strict_mode_a_failure_half_way_is_raised(inject):
    inject(half_done(ZeroDivisionError("late")))
    optimizer, params = optimizer_with_gradients(8.0, 8.0)
    scaler = watched(MemoryRecorder(), init_scale=4.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(Touched):
        scaler.unscale_(optimizer)
    assert [p.grad[0].item() for p in params] == [2.0, 8.0]


def test_an_error_of_torchs_op_passes(inject, monkeypatch):
    """Beyond what can be foreseen: here the kernel and torch's own operation both refuse."""
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    inject(Counted(1))

    def refuse(*_):
        raise RuntimeError("refused")

    recorder, params = MemoryRecorder(), parameters(3)
    params[0].grad = torch.ones(3)
    scaler = watched(recorder)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
        with pytest.raises(RuntimeError, match="refused"):
            unscale(scaler, params)
    assert failures.pop("stats.counted") == 1


def unscale(scaler, params):
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(params, lr=0.1))


class Wrapper(torch.Tensor):
    """A gradient that is more than a tensor."""


UNUSUAL = {
    "subclass": lambda: torch.ones(3).as_subclass(Wrapper),
    "sparse": lambda: torch.ones(3).to_sparse(),
    "expanded": lambda: torch.ones(()).expand(3),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "float16": lambda: torch.ones(3, dtype=torch.float16),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_goes_to_torch_whole(name, inject, monkeypatch):
    """The first gradient, which is usual, as well: what torch does before it refuses the second, it does itself."""
    monkeypatch.setenv("AMPWATCH_STRICT", "0")  # nor has a meta tensor statistics
    kernel = inject(Counted())

    def outcome(scaler):
        unusual = UNUSUAL[name]()
        kind = {"device": unusual.device, "dtype": unusual.dtype}
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, **kind))]
        params[0].grad, params[1].grad = torch.ones(3), unusual
        try:
            unscale(scaler, params)
        except Exception as error:  # noqa: BLE001 - which one it is, is what is compared
            return type(error), str(error), bits([params[0].grad])
        return bits([params[0].grad])

    assert outcome(watched(MemoryRecorder())) == outcome(torch.amp.GradScaler("cpu"))
    assert kernel.calls == []
    failures.clear()


def test_methods_of_others_are_called(inject):
    kernel, called = inject(Counted()), []

    class Theirs(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            called.append("class")
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    scaler = ampwatch.watch(Theirs("cpu"), recorder=MemoryRecorder())
    list(train(scaler, sgd, [parameters(3)], steps=1))
    assert (called, kernel.calls) == (["class"], [])


def test_a_method_patched_onto_the_instance_is_called(inject):
    kernel, called = inject(Counted()), []
    scaler = watched(MemoryRecorder())
    method = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda *given: called.append("instance") or method(*given)
    list(train(scaler, sgd, [parameters(3)], steps=1))
    assert (called, kernel.calls) == (["instance"], [])


def test_a_method_patched_into_torchs_class_is_called(inject, monkeypatch):
    kernel, called = inject(Counted()), []
    theirs = torch.amp.GradScaler._unscale_grads_

    @wraps(theirs)
    def patch(self, *given):
        called.append("patch")
        return theirs(self, *given)

    monkeypatch.setattr(torch.amp.GradScaler, "_unscale_grads_", patch)
    list(train(watched(MemoryRecorder()), sgd, [parameters(3)], steps=1))
    assert (called, kernel.calls) == (["patch"], [])


def test_under_a_dispatch_mode_torchs_operations_are_seen(inject):
    kernel, scaler = inject(Counted()), watched(MemoryRecorder())
    with FakeTensorMode(allow_non_fake_inputs=True):
        torchs = super(type(scaler), scaler)._unscale_grads_
        assert internals.replicas_for(scaler, torchs, (torch.zeros(1), torch.ones(1))) is None
    assert kernel.calls == []


@needs_library
def test_the_default_device_has_no_say():
    """Memory that the library writes to lies on the CPU."""
    grads, factors = [torch.ones(3)], (torch.zeros(()), torch.full((), 0.5))
    with torch.device("meta"):
        rows = cpu.unscale_with_statistics_(grads, *factors)
    assert (rows.device.type, grads[0].tolist()) == ("cpu", [0.5] * 3)


def test_without_a_gradient_torch_refuses_the_step(inject):
    kernel, messages = inject(Counted()), []
    for scaler in (watched(MemoryRecorder()), torch.amp.GradScaler("cpu")):
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError) as caught:
            scaler.step(torch.optim.SGD(parameters(3), lr=0.1))
        messages.append(str(caught.value))
    assert (messages[0], kernel.calls) == (messages[1], [])


def test_another_replicator_is_a_mismatch(monkeypatch):
    assert internals.mismatches(torch.amp.GradScaler) == []
    monkeypatch.delattr(torch.amp.grad_scaler._MultiDeviceReplicator, "get")
    assert internals.mismatches(torch.amp.GradScaler) == ["_MultiDeviceReplicator.get is missing"]


@needs_library
def test_by_default_the_built_kernel_is_in_the_header():
    recorder = MemoryRecorder()
    list(train(watched(recorder), sgd, [parameters(3)], steps=1))
    assert recorder.description["statistics"] == choose().name == "cpu"
