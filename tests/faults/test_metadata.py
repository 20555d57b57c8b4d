"""What is wrong before the first step: dtypes, parameters, scalers that are off, optimizers that cannot skip."""

import copy

import pytest
import torch
from loops import (
    Transformer,
    above_info,
    features,
    findings,
    half,
    mlp,
    recorded,
    recorded_optimizer,
    regression,
    told,
    train,
    worse_than_info,
)
from torch import nn


def regress(directory, model=None, optimizer=None, steps=12, dtype=torch.float16, **arguments):
    """A regression by whatever optimizer a test builds of the model."""
    model = model or mlp()
    with recorded(directory) as scaler:
        made = (optimizer or torch.optim.SGD)(model.parameters(), lr=1e-3)
        arguments = {"model": model, **arguments}
        train(
            model,
            scaler(**arguments),
            lambda s: regression(model, s),
            steps=steps,
            optimizer=made,
            dtype=dtype,
        )


def test_float16_parameters_are_told_with_torchs_refusal(tmp_path):
    with pytest.raises(ValueError, match="FP16"):
        regress(tmp_path, mlp().half())
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("low_precision_params", "error", 0)
    assert finding.tensor == "0.weight"


def test_bfloat16_parameters_are_a_warning_where_torch_takes_them(tmp_path):
    regress(tmp_path, mlp().bfloat16(), dtype=torch.bfloat16)
    assert above_info(tmp_path) == [("low_precision_params", "warning")]


def test_frozen_float16_layers_below_float32_ones_are_silent(tmp_path):
    model = mlp()
    model[0].half().requires_grad_(False)
    with recorded(tmp_path) as scaler:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3)
        train(model, scaler(model=model), lambda s: regression(model, s), optimizer=optimizer, steps=12)
    assert above_info(tmp_path) == []


class Complex(nn.Module):
    """A filter of complex numbers before a regression."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(8, dtype=torch.complex64))
        self.body = mlp()

    def forward(self, x):
        return self.body((torch.view_as_real(self.filter).sum(-1) * x).float())


def test_complex_parameters_are_told_with_torchs_refusal(tmp_path):
    with pytest.raises(NotImplementedError):
        regress(tmp_path, Complex())
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.tensor) == ("low_precision_params", "error", "filter")


def heads(directory, shared, steps=12):
    """A body and two heads, with an optimizer for each head; one of them may hold the body as well as the other."""
    body, heads = mlp(out=8), nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
    model = nn.ModuleList([body, heads])
    with recorded(directory) as make:
        scaler = make(model=model)
        optimizers = [torch.optim.Adam([*body.parameters(), *heads[0].parameters()], 1e-3)]
        second = [*body.parameters(), *heads[1].parameters()] if shared else list(heads[1].parameters())
        optimizers.append(torch.optim.Adam(second, 1e-3))
        for step in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            with half():
                loss = sum(regression(nn.Sequential(body, head), step) for head in heads)
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()


def test_a_parameter_in_two_optimizers_is_unscaled_twice(tmp_path):
    heads(tmp_path, shared=True)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("shared_parameter", "error", 0)
    assert finding.tensor == "0.0.weight"


def test_two_optimizers_with_parameters_of_their_own_are_silent(tmp_path):
    heads(tmp_path, shared=False)
    assert above_info(tmp_path) == []


def test_an_encoder_that_two_optimizers_step_in_turn_is_silent(tmp_path):
    model = mlp()
    with recorded(tmp_path) as make:
        scaler = make(model=model)
        optimizers = [torch.optim.SGD(model.parameters(), 1e-3), torch.optim.SGD(model[2].parameters(), 1e-3)]
        for step in range(20):
            train(
                model, scaler, lambda _, s=step: regression(model, s), steps=1, optimizer=optimizers[step % 2]
            )
    assert above_info(tmp_path) == []


def test_an_optimizer_of_a_copy_of_the_model_has_no_gradients(tmp_path):
    model = mlp()
    with pytest.raises(AssertionError, match="No inf checks"):
        regress(tmp_path, model, lambda _, lr: torch.optim.SGD(copy.deepcopy(model).parameters(), lr=lr))
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("no_gradients", "error", 0)
    assert "it holds other tensors than the model" in finding.headline


def test_a_loss_without_a_graph_is_told_when_it_comes(tmp_path):
    model, left = mlp(), mlp()
    regression(left, 0).backward()  # of another training in the process, which is over

    def loss_at(step):
        return regression(model, step) if step < 7 else torch.zeros((), requires_grad=True)

    with recorded(tmp_path) as scaler, pytest.raises(AssertionError):
        train(model, scaler(model=model), loss_at)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.first_attempt) == ("no_gradients", 7)
    assert "its graph is cut" in finding.headline


def test_everything_frozen_is_told(tmp_path):
    model = mlp()
    frozen = nn.Linear(8, 8).requires_grad_(False)
    optimizer = torch.optim.SGD(frozen.parameters(), 1e-3)
    with recorded(tmp_path) as scaler, pytest.raises(AssertionError):
        train(model, scaler(model=model), lambda s: regression(model, s), optimizer=optimizer)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, "all of them are frozen" in finding.headline) == ("no_gradients", True)


@pytest.mark.parametrize(
    ("dtype", "kinds"), [(torch.float16, [("missing_scaler", "error", 0, "")]), (torch.bfloat16, [])]
)
def test_a_scaler_that_is_off_matters_in_float16_only(tmp_path, dtype, kinds):
    regress(tmp_path, dtype=dtype, enabled=False)
    assert told(tmp_path) == kinds


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the scaler would be on")
def test_a_scaler_for_a_device_that_is_not_there_is_off(tmp_path):
    import ampwatch

    model = mlp()
    with recorded(tmp_path):
        settings = ampwatch.Settings.load(environ={}, dir=str(tmp_path), run="loop", quiet=True)
        scaler = ampwatch.GradScaler("cuda", settings=settings, model=model)
        train(model, scaler, lambda s: regression(model, s), steps=5)
    assert told(tmp_path) == [("backend_limit", "warning", 0, "")]


class HalfAdam(torch.optim.Optimizer):
    """Adam whose second moment is float16, to save memory."""

    def __init__(self, params, lr, eps, dtype=torch.float16) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("square", torch.zeros_like(p, dtype=self.dtype))
                square.mul_(0.999).add_(p.grad.to(self.dtype).square(), alpha=1e-3)
                p.add_(p.grad / (square.sqrt() + group["eps"]), alpha=-group["lr"])


def adam(directory, eps, dtype=torch.float16):
    model = Transformer()
    with recorded(directory) as scaler:
        optimizer = HalfAdam(model.parameters(), 1e-3, eps, dtype)
        train(model, scaler(model=model), model.loss, optimizer=optimizer, steps=12)


def test_an_eps_that_is_zero_in_float16_destroys_the_weights(tmp_path):
    adam(tmp_path, eps=1e-8)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity) == ("epsilon_underflow", "fatal")
    assert finding.first_attempt <= 1


def test_the_same_state_in_float32_is_silent(tmp_path):
    adam(tmp_path, eps=1e-8, dtype=torch.float32)
    assert above_info(tmp_path) == []


class Careless(torch.optim.SGD):
    """Unscales in its own kernel, as fused optimizers do; `heeds` tells whether it looks at found_inf."""

    _step_supports_amp_scaling = True
    heeds = False

    @torch.no_grad()
    def step(self, closure=None):
        if self.heeds and self.found_inf.item():
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / self.grad_scale)


class Heeding(Careless):
    heeds = True


class Counting(Heeding):
    """Counts its steps before it looks whether it is to skip."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = self.state[p].get("step", torch.zeros(())) + 1
        super().step()


@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        (Careless, [("fused_optimizer", "fatal", 0, "")]),
        (Heeding, []),
        (Counting, [("fused_optimizer", "fatal", 0, "")]),
    ],
)
def test_a_fused_optimizer_that_applies_an_overflow(tmp_path, optimizer, kinds):
    regress(tmp_path, optimizer=optimizer, init_scale=2.0**24, steps=30)
    assert told(tmp_path) == kinds


def test_torchs_own_fused_optimizer_is_silent(tmp_path):
    def fused(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    regress(tmp_path, optimizer=fused, init_scale=2.0**24, steps=30)
    assert above_info(tmp_path) == []


@pytest.fixture
def filled_with_nan():
    """Uninitialised memory is NaN, not what happens to lie there."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_with_nan")
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("init_scale", [2.0**24, 2.0**8])
def test_a_fused_sgd_whose_first_step_is_skipped_keeps_uninitialised_momentum(
    tmp_path, momentum, fused, init_scale
):
    def sgd(parameters, lr):
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, fused=fused)

    regress(tmp_path, optimizer=sgd, init_scale=init_scale, steps=30)
    told = [(f.kind, f.severity, f.first_attempt) for f in worse_than_info(tmp_path)]
    harmed = fused and momentum and init_scale > 2.0**8
    assert told == ([("fused_optimizer", "fatal", 0)] if harmed else [])


def detached(directory, cut, steps=60):
    """A layer whose output is cut off the graph, or that is frozen."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    if cut == "frozen":
        model[0].requires_grad_(False)
    with recorded(directory) as make:

        def loss(step):
            hidden = model[:2](features(step))
            out = model[2](hidden.detach() if cut == "detached" else hidden)
            return out.float().square().mean()

        train(model, make(model=model), loss, steps=steps)
    return [(f.kind, f.severity, f.tensor) for f in findings(directory) if f.kind != "calibration"]


@pytest.mark.parametrize(
    ("cut", "said"), [("detached", [("no_gradients", "info", "0.weight")]), ("frozen", []), ("", [])]
)
def test_a_layer_that_the_loss_does_not_reach(tmp_path, cut, said):
    assert detached(tmp_path, cut) == said


def test_a_few_attempts_do_not_tell(tmp_path):
    assert detached(tmp_path, "detached", steps=49) == []


def scaled_up(dtype):
    """A regression whose weights lie near 1, so that a step of 1e-5 is below half a unit in their last place."""
    model = mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.sign() * (1 + p.abs()))
    return model.to(dtype)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_bfloat16_weights_that_no_step_moves(tmp_path, make):
    def unmoved(parameters, lr):
        return make(parameters, lr=1e-6, weight_decay=0)

    regress(tmp_path, scaled_up(torch.bfloat16), unmoved, dtype=torch.bfloat16)
    assert told(tmp_path) == [("low_precision_params", "error", 0, "0.weight")]
    (finding,) = worse_than_info(tmp_path)
    assert "0 of 161 weights have changed" in finding.evidence[0].text
    assert "learning rate does not mend it" in finding.advice[-1].text


@pytest.mark.parametrize(("dtype", "lr"), [(torch.bfloat16, 2e-3), (torch.float32, 1e-6)])
def test_weights_that_move_are_silent(tmp_path, dtype, lr):
    assert alone(tmp_path, lambda s: lr, dtype) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_without_a_scaler_that_no_step_moves(tmp_path, dtype):
    assert alone(tmp_path, lambda s: 1e-6, dtype) == [("low_precision_params", "error", 0, "0.weight")]


def test_weights_that_wait_for_the_end_of_a_warm_up_are_silent(tmp_path):
    assert alone(tmp_path, lambda s: 1e-6 * s, torch.bfloat16) == []


def test_weights_that_stand_still_at_the_end_of_a_schedule_are_silent(tmp_path):
    assert alone(tmp_path, lambda s: 2e-3 if s < 6 else 1e-6, torch.bfloat16, steps=80) == []


class WithCopies(torch.optim.SGD):
    """It keeps float32 copies of its weights, which are what it trains."""

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            copy = self.state[p].setdefault("master", p.float())
            copy -= group["lr"] * p.grad.float()
            p.copy_(copy)


def test_weights_whose_float32_copies_move_are_silent(tmp_path):
    assert alone(tmp_path, lambda s: 1e-6, torch.bfloat16, make=WithCopies) == []


def alone(directory, lr_at, dtype, steps=20, make=torch.optim.SGD):
    """Training without a scaler, at learning rates by step."""
    model = scaled_up(dtype)
    with recorded_optimizer(directory) as watched:
        optimizer = watched(make(model.parameters(), lr_at(0)), model=model)
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr_at(step)
            optimizer.zero_grad()
            x = features(step)
            nn.functional.mse_loss(model(x.to(dtype)).float(), x.sum(-1, keepdim=True)).backward()
            optimizer.step()
    return told(directory)
