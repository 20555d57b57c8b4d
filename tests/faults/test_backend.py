"""Devices, backends and fused optimizers that do what they should not, as far as a CPU can stand in for them."""

import pytest
import torch
import torch.distributed as dist
from loops import above_info, mlp, recorded, regression, told, train, worse_than_info
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampwatch


class BrokenKernel(TorchDispatchMode):
    """A device whose float16 convolution gives NaN, as some GPUs do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        broken = func is torch.ops.aten.convolution.default and out.dtype is torch.float16
        return torch.full_like(out, torch.nan) if broken else out


def pictures(directory, mode, steps=10):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    x = torch.randn(8, 1, 8, 8)
    with recorded(directory) as scaler, mode:
        train(model, scaler(model=model), lambda _: model(x).float().square().mean(), steps=steps)


def test_a_device_whose_convolution_is_broken_in_float16(tmp_path):
    pictures(tmp_path, BrokenKernel(), steps=6)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("device_fault", "fatal", 0)
    assert finding.module == "0"


def test_a_device_that_is_well_is_silent(tmp_path):
    pictures(tmp_path, torch.enable_grad())
    assert above_info(tmp_path) == []


class Saturate(torch.autograd.Function):
    """Hands gradients on as a device does whose float16 has no inf."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad.float() * 64).clamp(-65504, 65504).to(grad.dtype) if SATURATES else grad


SATURATES = True


@pytest.mark.parametrize(("saturates", "said"), [(True, [("backend_limit", "warning", 0, "")]), (False, [])])
def test_a_backend_that_saturates(tmp_path, monkeypatch, saturates, said):
    monkeypatch.setitem(globals(), "SATURATES", saturates)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with recorded(tmp_path) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), 1e-9)
        train(
            model,
            scaler(model=model, init_scale=2.0**10),
            lambda s: Saturate.apply(model(torch.ones(1, 8))).float().sum() * 4,
            optimizer=optimizer,
            steps=12,
        )
    assert told(tmp_path) == said


class Shifted(nn.Linear):
    """Multiplies in float16, where a device may saturate, and adds its bias in float32."""

    def forward(self, x):
        return (x.half() @ Saturate.apply(self.weight.T.half())).float() + self.bias


@pytest.mark.parametrize(
    ("saturates", "said"), [(True, [("backend_limit", "warning", 0, "weight")]), (False, [])]
)
def test_a_backend_that_saturates_beside_larger_gradients_in_float32(tmp_path, monkeypatch, saturates, said):
    monkeypatch.setitem(globals(), "SATURATES", saturates)
    model = Shifted(8, 1)
    with recorded(tmp_path) as scaler:
        optimizer = torch.optim.SGD(model.parameters(), 1e-9)
        train(
            model,
            scaler(model=model, init_scale=2.0**10),
            lambda s: model(torch.ones(32, 8)).sum() * 4,
            optimizer=optimizer,
            steps=12,
        )
    assert told(tmp_path) == said


class Words(nn.Module):
    """A float16 embedding with sparse gradients; a word that is frequent is added up many times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True, dtype=torch.float16)

    def forward(self, ids):
        return self.words(ids).float().square().sum()


@pytest.fixture
def world(tmp_path):
    """A process group of one rank, which ShardedGradScaler wants."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("repeats", "kind"), [(64, "sparse_overflow"), (1, "low_precision_params")])
def test_a_frequent_word_whose_sparse_gradients_overflow_in_their_sum(tmp_path, world, repeats, kind):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = Words()
    settings = ampwatch.Settings.load(environ={}, dir=str(tmp_path / "run"), run="loop", quiet=True)
    with recorded(tmp_path / "run"):
        scaler = ampwatch.watch(ShardedGradScaler("cpu", init_scale=2.0**13), model=model, settings=settings)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([1 + step % 2] * repeats))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert told(tmp_path / "run") == [(kind, "warning", 0, "words.weight")]


class Twice(torch.optim.SGD):
    """A fused optimizer that asks the scaler itself, and divides whatever torch says."""

    _step_supports_amp_scaling = True
    scaler = None

    @torch.no_grad()
    def step(self, closure=None):
        if self.found_inf.item():
            return
        scale = self.grad_scale if self.scaler is None else self.scaler.get_scale()
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] * (p.grad if scale is None else p.grad / scale))


def unscaled_first(directory, optimizer_type, obedient=True, steps=12, **arguments):
    model = mlp()
    with recorded(directory) as make:
        scaler = make(model=model, init_scale=2.0**12)
        optimizer = optimizer_type(model.parameters(), lr=1e-2, **arguments)
        if not obedient:
            optimizer.scaler = scaler
        train(model, scaler, lambda s: regression(model, s), optimizer=optimizer, clip=1e3, steps=steps)
    return [(f.kind, f.severity, f.first_attempt) for f in worse_than_info(directory)]


def test_gradients_that_unscale_and_the_optimizer_divide(tmp_path):
    found = unscaled_first(tmp_path, Twice, obedient=False, steps=2)
    assert found == [("fused_optimizer", "fatal", 0)]


@pytest.mark.parametrize("optimizer", [Twice, torch.optim.SGD, torch.optim.AdamW])
def test_fused_optimizers_that_heed_what_torch_says_are_silent(tmp_path, optimizer):
    arguments = {} if optimizer is Twice else {"fused": True}
    assert unscaled_first(tmp_path, optimizer, **arguments) == []
