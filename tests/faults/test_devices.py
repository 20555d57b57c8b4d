"""Autocast, scaler and parameters that are not on one device."""

import pytest
import torch
from loops import above_info, findings, mlp, recorded, regression, told, train, worse_than_info


def entered(directory, *devices, steps=8):
    """A loop on the CPU that enters autocast for these devices."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with recorded(directory) as make:
        scaler = make(model=model)
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast(devices[0], torch.float16), torch.autocast(devices[-1], torch.float16):
                loss = regression(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def test_autocast_for_another_device_than_the_models(tmp_path):
    entered(tmp_path, "xpu")
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_attempt) == ("useless_scaler", "warning", 0)
    assert finding.headline.startswith("Autocast is on for xpu, and the model computes on cpu")


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="autocast would be on")
def test_autocast_for_a_device_that_is_not_there_is_no_autocast(tmp_path):
    entered(tmp_path, "cuda")
    assert told(tmp_path) == [("useless_scaler", "warning", 0, "")]


def test_autocast_for_the_models_device_is_silent_whatever_else_it_is_on_for(tmp_path):
    entered(tmp_path, "xpu", "cpu")
    assert above_info(tmp_path) == []


def test_an_optimizer_built_before_the_model_had_its_numbers(tmp_path):
    with torch.device("meta"):
        model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    with recorded(tmp_path) as make, pytest.raises(AssertionError, match="No inf checks"):
        train(model, make(model=model), lambda s: regression(model, s), optimizer=optimizer)
    assert told(tmp_path) == [("no_gradients", "error", 0, "optimizer.0.param.0")]


def test_a_whole_training_on_meta(tmp_path):
    with torch.device("meta"):
        model, x = mlp(), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with recorded(tmp_path) as make, pytest.raises(RuntimeError, match="meta"):
        train(model, make(model=model), lambda _: model(x).float().square().mean(), optimizer=optimizer)
    assert told(tmp_path) == [("no_gradients", "error", 0, "0.weight")]


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_scaler_for_another_device_works(tmp_path, device):
    import ampwatch

    model = mlp()
    settings = ampwatch.Settings.load(environ={}, dir=str(tmp_path), run="loop", quiet=True)
    scaler = ampwatch.GradScaler(device, model=model, settings=settings)
    train(model, scaler, lambda s: regression(model, s), steps=8)
    ampwatch.finish()
    said = [(f.kind, f.severity) for f in findings(tmp_path) if f.kind == "backend_limit"]
    assert (above_info(tmp_path), said) == ([], [("backend_limit", "info")] if device == "mps" else [])
