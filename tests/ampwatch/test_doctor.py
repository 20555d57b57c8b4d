"""What `ampwatch doctor` says of this machine, of broken ones, and of a real server."""

import json

import pytest
import torch
from typer.testing import CliRunner

from ampwatch import cli, doctor
from ampwatch.settings import Settings
from ampwatch.stats import choose, cpu, reference
from ampwatch_server.serve import running


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch, tmp_path):
    for name in ("SERVER", "STATS", "DISABLED", "TOKEN"):
        monkeypatch.delenv(f"AMPWATCH_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def looked(**settings):
    return {check.name: check for check in doctor.checks(Settings.load(environ={}, **settings))}


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["doctor", *arguments], catch_exceptions=False)


def test_this_machine_is_well_and_nothing_is_left_behind(tmp_path):
    found = looked(dir=tmp_path / "runs")
    assert [name for name, check in found.items() if check.state == "failed"] == []
    assert found["torch"].says.startswith(torch.__version__)
    assert found["reference pass"].says.endswith("tried, and equal to its definition")
    assert str(tmp_path / "runs") in found["folder"].says
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not cpu.available(), reason="no C compiler when it was installed")
def test_the_cpu_pass_names_its_instructions():
    assert f"with {cpu.best_instructions()} instructions" in looked()["cpu pass"].says


def test_it_says_which_pass_a_job_gets_and_why():
    chosen = looked()["chosen pass"]
    assert chosen.says.startswith(f"{choose.weigh().name} for training on cpu: ")
    assert looked(statistics="reference")["chosen pass"].says.endswith(
        "reference for training on cpu: it was asked for"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's pass works here")
def test_a_pass_that_was_asked_for_and_cannot_work_fails():
    chosen = looked(statistics="triton")["chosen pass"]
    assert (chosen.state, chosen.says) == (
        "failed",
        "reference for training on cpu: it runs on GPUs, and the scaler is for cpu",
    )


def test_a_pass_that_computes_something_else_is_found_out(monkeypatch):
    wrong = choose.Statistics("reference", lambda grads: reference.statistics_of(grads) + 1)
    monkeypatch.setattr(choose, "load", lambda name: wrong)
    found = looked()["reference pass"]
    assert (found.state, found.says.split(": ")[2]) == ("failed", "sum_sq is not what the reference computes")


def test_a_pass_that_unscales_wrongly_is_found_out(monkeypatch):
    def unscale(grads, found_inf, inv_scale):
        rows = reference.statistics_of(grads)
        grads[0].mul_(inv_scale * 2)
        return rows

    monkeypatch.setattr(choose, "load", lambda _: choose.Statistics("cpu", reference.statistics_of, unscale))
    assert looked()["reference pass"].says.endswith("gradients are not unscaled as torch does")


def test_a_scaler_that_is_not_torchs_any_more_fails(monkeypatch):
    class Changed(torch.amp.GradScaler):
        def update(self):
            """Without the new scale."""

    monkeypatch.setattr(torch.amp, "GradScaler", Changed)
    found = looked()["torch"]
    assert (found.state, "update(self)" in found.says) == ("failed", True)


def test_a_folder_that_cannot_be_written_fails():
    assert looked(dir="/proc/nowhere")["folder"].state == "failed"


def test_a_folder_that_is_a_file_fails(tmp_path):
    (tmp_path / "junk.txt").touch()
    for directory in (tmp_path / "junk.txt", tmp_path / "junk.txt" / "runs"):
        found = looked(dir=directory)["folder"]
        assert found.state == "failed"
        assert found.says.endswith("junk.txt is a file")


def test_a_folder_that_may_not_grow_fails(tmp_path):
    found = looked(dir=tmp_path, spool_min_free_bytes=1 << 60)["folder"]
    assert (found.state, "AMPWATCH_SPOOL_MIN_FREE_BYTES bounds it" in found.says) == ("failed", True)


def test_recording_that_is_off_is_a_note():
    assert looked(enabled=False)["recording"].state == "note"


def test_what_raises_is_a_failure_like_others(monkeypatch):
    monkeypatch.setattr(doctor, "_LOOKS", {"python": lambda _: 1 / 0})
    (check,) = doctor.checks(Settings.load(environ={}))
    assert (check.state, check.says) == ("failed", "ZeroDivisionError('division by zero')")


def test_a_server_that_takes_the_token(tmp_path):
    with running(database=str(tmp_path / "db"), port=0) as server:
        good, bad = (looked(server=server.url, token=token)["server"] for token in (server.token, "wrong"))
    assert (good.state, good.says) == ("ok", f"{server.url} is there, and takes the token")
    assert (bad.state, "token" in bad.says) == ("failed", True)


def test_a_server_that_is_not_there(tmp_path):
    assert looked(server="http://127.0.0.1:9", token="t")["server"].says.startswith(
        "http://127.0.0.1:9 cannot be reached"
    )
    assert looked(server="http://example.org", token="t")["server"].state == "failed"


def test_the_command_says_a_line_for_each_and_ends_well(tmp_path):
    done = invoke("--dir", str(tmp_path))
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, len(doctor._LOOKS))
    assert done.stdout.startswith("ok      python          3.")


def test_the_command_fails_where_something_does(tmp_path):
    done = invoke("--json", "--dir", str(tmp_path), "--server", "http://127.0.0.1:9")
    told = json.loads(done.stdout)
    assert (done.exit_code, told["ok"]) == (1, False)
    assert [check["name"] for check in told["checks"] if check["state"] == "failed"] == ["server"]
