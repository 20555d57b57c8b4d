import json

import pytest
from typer.testing import CliRunner

from ampwatch.cli import app


@pytest.fixture
def trace(tmp_path):
    """A burst of 14 skips from 2^30, then clean attempts."""
    path = tmp_path / "trace.csv"
    rows = [f"{t},{2 ** max(30 - t, 16)},{int(t < 14)},1.0" for t in range(2000)]
    path.write_text("\n".join(["attempt,scale,found_inf,loss", *rows]))
    return path


def run(*arguments):
    answer = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    return answer.output if answer.exception is None else str(answer.exception)


def test_it_recommends(trace):
    assert run(trace).splitlines() == [
        "Begin at 2^16, the scale that the run settled on: 0 steps would likely have been lost instead of 14.",
        "    skipped 0 to 14, as recorded 14",
        "    torch.amp.GradScaler()",
    ]


def test_it_replays_a_setting(trace):
    assert run(trace, "--policy", "megatron", "--set", "initial_scale=2**17", "--set", "hysteresis=1").splitlines() == [
        "megatron(initial_scale=2.0**17, hysteresis=1) over 2,000 attempts",
        "                    skipped  underflow  scale at the end",
        "  as recorded       14       unknown    65536",
        "  replayed, best    1        unknown    131072",
        "  replayed, likely  2        unknown    65536",
        "  replayed, worst   14       unknown    16",
    ]  # fmt: skip


def test_its_data_is_the_rest_api_s(trace):
    data = json.loads(run(trace, "--set", "init_scale=65536", "--json"))
    assert (data["policy"], data["replayed"]["likely"]["skipped"], data["attempts"]) == ("torch", 0, 2000)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("growth_interval=many", "--set growth_interval=many: it must be NAME=VALUE, the value a number as 65536 or 2**16"),
        ("window=5", "parameters.window: 'torch' has none, only init_scale, growth_factor, backoff_factor, growth_interval"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_named(trace, given, told):
    assert run(trace, "--set", given) == told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--rank", 7), "the run has no rank 7; those it has: 0"),
        (("--scaler", 9), "the run has no scaler 9; those it has: 0"),
    ],
)
def test_a_rank_or_scaler_that_there_is_not(trace, given, told):
    assert run(trace, *given) == told
