"""Which implementation of the statistics pass a scaler gets, and what is said of it."""

from __future__ import annotations

import logging

import pytest
import torch

import ampwatch
from ampwatch.errors import SettingsError
from ampwatch.settings import Settings
from ampwatch.stats import choose as choosing
from ampwatch.stats import cpu, fused
from ampwatch.stats.choose import Statistics, choose
from ampwatch.stats.reference import statistics_of

from .recorded import MemoryRecorder


@pytest.fixture(autouse=True)
def nothing_said_yet():
    choosing.load.cache_clear()
    choosing._warn_once.cache_clear()


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "ampwatch"]


def test_a_choice_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="ampwatch")
    assert choose("reference") is choose("reference")
    assert choose("reference") == Statistics("reference", statistics_of)
    assert messages(caplog) == ["statistics pass: reference"]


@pytest.mark.parametrize(("built", "name"), [(True, "cpu"), (False, "reference")])
def test_auto_on_the_cpu_is_the_kernel_where_it_was_built(built, name, monkeypatch):
    monkeypatch.setattr(cpu, "available", lambda: built)
    assert choose("auto", "cpu").name == name


def test_on_a_gpu_triton_is_taken_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(fused, "available", lambda: True)
    assert choose("triton", "cuda").unscale is fused.unscale_with_statistics_


@pytest.mark.parametrize(
    ("name", "device", "why"),
    [
        ("cpu", "cuda", "it reads main memory, and the scaler is for cuda"),
        ("cpu", "cpu", "its library was not built when ampwatch was installed"),
        ("triton", "cpu", "it runs on GPUs, and the scaler is for cpu"),
        ("triton", "cuda", "it needs a GPU, and Triton 3.6"),
    ],
)
def test_what_cannot_work_gives_one_warning_and_the_reference(name, device, why, monkeypatch, caplog):
    for kernel in (cpu, fused):
        monkeypatch.setattr(kernel, "available", lambda: False)
    assert [choose(name, device).name for _ in range(2)] == ["reference", "reference"]
    assert messages(caplog) == [
        f"ampwatch: statistics pass {name!r} cannot be used: {why}. The reference takes its place."
    ]


def test_an_unknown_implementation_names_the_known():
    known = r"AMPWATCH_STATS\): got 'gpu', it must be one of auto, reference, cpu, triton"
    with pytest.raises(SettingsError, match=known):
        choose("gpu")


def test_the_environment_has_no_say_beside_the_settings(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STATS", "gpu")
    assert choose(Settings.load(statistics="reference").statistics).name == "reference"
    with pytest.raises(SettingsError):
        choose(Settings.load().statistics)


def test_a_scaler_chooses_when_it_is_first_used_and_its_device_at_work():
    recorder = MemoryRecorder()
    scaler = ampwatch.GradScaler("cpu", recorder=recorder)
    assert recorder.description == {}
    weight = torch.nn.Parameter(torch.ones(2))
    scaler.scale(weight.sum()).backward()
    scaler.step(torch.optim.SGD([weight]))
    assert recorder.description["statistics"] == choose("auto", "cpu").name


def test_a_scaler_that_is_off_says_nothing_of_a_pass(caplog):
    recorder = MemoryRecorder()
    ampwatch.GradScaler("cuda", recorder=recorder, enabled=False).scale(torch.ones(()))
    assert (recorder.description["statistics"], messages(caplog)) == ("reference", [])
