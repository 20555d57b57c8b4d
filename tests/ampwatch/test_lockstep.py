"""The same training as torch's, bit for bit: one loop run by torch.amp.GradScaler and by ours, step for step."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import ampwatch

from .recorded import WORKING, MemoryRecorder

OURS = "ours"
IN_PLACE = "in place"

_statistics: list[str] = []  # the pass of the scalers that are made


@pytest.fixture(autouse=True, params=WORKING)
def strict(request, monkeypatch):
    """With each implementation that works here; where it fails, so does the test."""
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    _statistics[:] = [request.param]


def make(kind, model=None, **arguments):
    """A scaler of torch, of ours, or one of torch that is watched in place."""
    if kind == "torch":
        return torch.amp.GradScaler("cpu", **arguments)
    recorder = MemoryRecorder(statistics=_statistics[0])
    if kind == OURS:
        return ampwatch.GradScaler("cpu", model=model, recorder=recorder, **arguments)
    scaler = torch.amp.GradScaler("cpu", **arguments)
    assert ampwatch.watch(scaler, model=model, recorder=recorder) is scaler
    return scaler


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def batches(steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 6, generator=generator) for _ in range(steps)]


def loss_of(model, batch):
    with torch.autocast("cpu", dtype=torch.float16):
        return model(batch).float().square().mean()


def snapshot(scaler, model, *optimizers):
    """Everything that a step can change, as bytes where it is a tensor."""
    tensors = list(model.parameters())
    grads = [p.grad for p in tensors if p.grad is not None]
    states = [
        v for o in optimizers for s in o.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    ]
    return (
        [
            bytes(t.detach().contiguous().view(torch.uint8).numpy())
            for t in (*tensors, *grads, *map(torch.atleast_1d, states))
        ],
        repr(scaler.state_dict()),  # repr: a scale may be NaN
        scaler.get_scale() if scaler.is_enabled() else None,
    )


def spoil(model, step, bad):
    """Write inf or NaN into one gradient: only here, where the training itself is not what is tested."""
    if step in bad:
        next(model.parameters()).grad.view(-1)[0] = bad[step]


def train(kind, make_optimizer, *, steps=12, bad=None, style="plain", **arguments):
    """One loop; answers what stood after every step."""
    model = small_model()
    optimizer = make_optimizer(model.parameters())
    scaler = make(kind, model, **({"growth_interval": 3} | arguments))
    taken = []
    for step, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        for part in batch.chunk(2) if style == "accumulate" else [batch]:
            scaler.scale(loss_of(model, part)).backward()
        spoil(model, step, bad or {3: math.inf, 7: math.nan})
        if style == "clip":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        taken.append(snapshot(scaler, model, optimizer))
    return taken


def assert_lockstep(*arguments, **named):
    expected = train("torch", *arguments, **named)
    assert train(OURS, *arguments, **named) == expected
    assert train(IN_PLACE, *arguments, **named) == expected


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adadelta": torch.optim.Adadelta,
    "Rprop": torch.optim.Rprop,
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


@pytest.mark.parametrize("style", ["plain", "clip", "accumulate"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, style):
    assert_lockstep(OPTIMIZERS[name], style=style)


@pytest.mark.parametrize("style", ["plain", "clip", "accumulate"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers(name, style):
    assert_lockstep(partial(OPTIMIZERS[name], fused=True), style=style)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_foreach_optimizers(name):
    assert_lockstep(partial(OPTIMIZERS[name], foreach=True))


@pytest.mark.parametrize("init_scale", [1000.0, 2.0**127, 3e-39, 2.0**-130, 1.0])
@pytest.mark.parametrize("fused", [False, True])
def test_odd_scales(init_scale, fused):
    assert_lockstep(partial(torch.optim.Adam, fused=fused), init_scale=init_scale)


@pytest.mark.parametrize(
    "bad", [dict.fromkeys(range(12), math.inf), {0: -math.inf}, dict.fromkeys((1, 2, 4), math.nan)]
)
def test_runs_of_skips(bad):
    assert_lockstep(torch.optim.AdamW, bad=bad)


def test_disabled():
    assert_lockstep(torch.optim.Adam, enabled=False, bad={99: 0.0})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_dtypes(dtype):
    def run(kind):
        model = nn.Linear(4, 2, dtype=dtype)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = make(kind)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 4, dtype=dtype)).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        return snapshot(scaler, model)

    assert run(OURS) == run("torch")


def test_several_optimizers_and_parameters_without_a_gradient():
    def run(kind):
        model = small_model()
        unused = nn.Parameter(torch.ones(2))
        first = torch.optim.SGD([*model[0].parameters(), unused], lr=0.1)
        second = torch.optim.Adam(model[3].parameters(), fused=True)
        scaler = make(kind, model, growth_interval=2)
        for step, batch in enumerate(batches(8)):
            first.zero_grad()
            second.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            spoil(model, step, {2: math.inf})
            scaler.unscale_(first)
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            yield snapshot(scaler, model, first, second)

    assert list(run(OURS)) == list(run("torch"))


def test_sparse_gradients():
    def run(kind):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        scaler = make(kind, model)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([1, 1, 7])).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return model.weight.detach().clone(), scaler.state_dict()

    (ours, state), (torchs, expected) = run(OURS), run("torch")
    assert (torch.equal(ours, torchs), state) == (True, expected)


@pytest.mark.parametrize("new_scale", [512.0, torch.tensor(384.0), torch.tensor(5e-42)])
def test_manual_updates(new_scale):
    def run(kind):
        model, scaler = small_model(), make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update(new_scale if step == 1 else None)
            yield snapshot(scaler, model, optimizer)

    assert list(run(OURS)) == list(run("torch"))


@pytest.mark.parametrize(
    "outputs",
    [
        lambda loss: [loss, loss * 2],
        lambda loss: (loss, [loss, (loss,)]),
        lambda loss: (part for part in (loss, loss * 3)),
        lambda loss: [loss.expand(3), loss.half()],
    ],
)
def test_nested_and_lazy_outputs(outputs):
    def run(kind):
        scaled = make(kind).scale(outputs(torch.tensor(1.5)))
        return type(scaled), [
            part.tolist() if isinstance(part, torch.Tensor) else str(part) for part in scaled
        ]

    assert run(OURS) == run("torch")


STATE = {
    "scale": 3.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 5,
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("kinds", [*itertools.product(["torch", OURS, IN_PLACE], repeat=2)])
def test_state_dicts_load_both_ways(kinds, used):
    source, target = (make(kind) for kind in kinds)
    source.load_state_dict(STATE)
    if used:
        target.scale(torch.ones(()))
    target.load_state_dict(source.state_dict())
    assert target.state_dict() == STATE
    assert target.scale(torch.ones(())).item() == 3.0


def used_scaler(kind):
    scaler, model = make(kind), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(3):
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("kind", [OURS, IN_PLACE])
def test_copies_have_torchs_state(kind, copier, monkeypatch, tmp_path):
    monkeypatch.setenv("AMPWATCH_DISABLED", "1")  # a pickled copy asks the environment where to record
    ours, torchs = copier(used_scaler(kind)), copier(used_scaler("torch"))
    assert ours.state_dict() == torchs.state_dict()
    assert ours.scale(torch.ones(())).item() == torchs.scale(torch.ones(())).item()


@pytest.mark.parametrize("kind", [OURS, IN_PLACE])
def test_a_copy_shares_nothing_with_its_original(kind):
    original = used_scaler(kind)
    watched = vars(original)["_ampwatch"]
    duplicate = copy.deepcopy(original)
    assert watched not in vars(duplicate).values()
    duplicate.scale(torch.ones(()))
    assert vars(duplicate).get("_ampwatch") is not watched


def test_a_copy_of_a_scaler_watched_in_place_is_of_its_first_class():
    assert type(copy.deepcopy(used_scaler(IN_PLACE))) is torch.amp.GradScaler
    assert type(copy.deepcopy(used_scaler(OURS))) is ampwatch.GradScaler


def wrong_calls():
    def unscale_twice(scaler, optimizer):
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)

    def step_twice(scaler, optimizer):
        scaler.step(optimizer)
        scaler.step(optimizer)

    def unscale_after_step(scaler, optimizer):
        scaler.step(optimizer)
        scaler.unscale_(optimizer)

    return {
        "unscale_twice": unscale_twice,
        "step_twice": step_twice,
        "unscale_after_step": unscale_after_step,
        "update_at_once": lambda scaler, _: scaler.update(),
        "closure": lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: None),
        "step_of_nothing": lambda scaler, _: scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        "scale_of_a_number": lambda scaler, _: scaler.scale(1.0),
        "new_scale_of_two": lambda scaler, _: scaler.update(torch.ones(2)),
        "empty_state": lambda scaler, _: scaler.load_state_dict({}),
        "pickled_within": lambda scaler, o: (scaler.unscale_(o), pickle.dumps(scaler)),
        "float16": lambda scaler, _: scaler.unscale_(torch.optim.SGD([float16_parameter()])),
    }


def float16_parameter():
    parameter = nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    return parameter


def refusal(kind, wrong, *, scaled=True):
    scaler, model = make(kind), small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if scaled:
        scaler.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one it is, is what is compared
        wrong(scaler, optimizer)
    return type(caught.value), str(caught.value), scaler.state_dict()


@pytest.mark.parametrize("kind", [OURS, IN_PLACE])
@pytest.mark.parametrize("name", wrong_calls())
def test_wrong_calls_raise_what_torch_raises(name, kind):
    assert refusal(kind, wrong_calls()[name]) == refusal("torch", wrong_calls()[name])


@pytest.mark.parametrize("name", ["step_twice", "update_at_once", "unscale_twice"])
def test_calls_before_the_first_scale_raise_what_torch_raises(name):
    wrong = wrong_calls()[name]
    assert refusal(OURS, wrong, scaled=False) == refusal("torch", wrong, scaled=False)


@pytest.mark.parametrize("arguments", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
def test_wrong_arguments_raise_what_torch_raises(arguments):
    with pytest.raises(AssertionError) as torchs:
        make("torch", **arguments)
    with pytest.raises(AssertionError) as ours:
        make(OURS, **arguments)
    assert str(ours.value) == str(torchs.value)


def test_cuda_asked_for_and_not_there_warns_as_torch_does():
    def warned(make_scaler):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return make_scaler("cuda").is_enabled(), [(w.category, str(w.message)) for w in caught]

    ours = partial(ampwatch.GradScaler, recorder=MemoryRecorder())
    assert warned(ours) == warned(torch.amp.GradScaler)
