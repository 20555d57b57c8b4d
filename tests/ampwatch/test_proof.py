"""Whether `auto` takes the Triton kernel on a GPU: what a trial finds, what is kept of it, and what it is good for."""

from __future__ import annotations

import json
import logging
import threading

import pytest
import torch

from ampwatch import doctor
from ampwatch.stats import choose as choosing
from ampwatch.stats import fused, reference, trial
from ampwatch.stats.choose import Statistics, choose, weigh
from ampwatch.stats.proof import Proofs, Setup, setups_here
from ampwatch.stats.touched import Touched
from ampwatch.unscaling import Pass

from .recorded import MemoryRecorder

H100 = Setup("NVIDIA H100", "9.0", "12080", "12.8", "2.13.0", "3.9.0", "0123456789abcdef")
A100 = H100._replace(gpu="NVIDIA A100", capability="8.0")
TRY_IT = "run `ampwatch doctor` once on this machine"


@pytest.fixture(autouse=True)
def nothing_said_yet():
    choosing.load.cache_clear()
    choosing._warn_once.cache_clear()


@pytest.fixture
def proofs(tmp_path):
    return of(tmp_path)


def of(folder, *setups):
    return Proofs(folder, lambda: setups or [H100], clock=lambda: 1000.0)


def test_without_a_proof_the_gpu_and_the_command_are_named(proofs):
    assert proofs.obstacle() == f"the Triton kernel has not been tried on this NVIDIA H100: {TRY_IT}"


def test_a_proof_is_one_small_file_and_enough(proofs, tmp_path):
    path = proofs.add(H100, True, "equal; fast")
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text()) == {
        "setup": list(H100),
        "holds": True,
        "says": "equal; fast",
        "made_at": 1000.0,
    }
    assert proofs.obstacle() is None


@pytest.mark.parametrize("field", Setup._fields)
def test_a_proof_of_another_setup_proves_nothing(field, proofs, tmp_path):
    proofs.add(H100._replace(**{field: "other"}), True, "equal; fast")
    assert "has not been tried" in proofs.obstacle()


def test_a_trial_that_failed_is_told(proofs):
    proofs.add(H100, True, "equal; fast")
    proofs.add(H100, False, "sum_sq is not what the reference computes")
    assert proofs.obstacle() == (
        "the Triton kernel is not to be relied on with this NVIDIA H100 "
        f"(sum_sq is not what the reference computes): {TRY_IT}"
    )


def test_every_kind_of_gpu_needs_one(tmp_path):
    both = of(tmp_path, A100, H100)
    both.add(H100, True, "equal; fast")
    assert "on this NVIDIA A100" in both.obstacle()
    both.add(A100, True, "equal; fast")
    assert both.obstacle() is None


def test_what_cannot_be_read_is_no_proof(proofs):
    path = proofs.add(H100, True, "equal; fast")
    path.write_text('{"holds": true')
    assert proofs.obstacle().startswith(f"the proof of the Triton kernel in {path} cannot be read (")
    path.unlink()
    path.mkdir()
    assert "cannot be told (IsADirectoryError(" in proofs.obstacle()


def test_without_a_home_folder_all_goes_on(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # no such user either
    assert "cannot be told (RuntimeError(" in Proofs(setups=lambda: [H100]).obstacle()


def test_by_default_it_lies_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Proofs().add(H100, True, "").parent == tmp_path / "ampwatch" / "proofs"


def test_those_who_read_while_many_write_see_a_whole_file(tmp_path):
    proofs = of(tmp_path)
    proofs.add(H100, True, "")
    writers = [
        threading.Thread(target=lambda: [proofs.add(H100, True, "x" * 9000) for _ in range(50)])
        for _ in range(4)
    ]
    for each in writers:
        each.start()
    seen = {proofs.obstacle() for _ in range(200)}
    for each in writers:
        each.join()
    assert (seen, len(list(tmp_path.iterdir()))) == ({None}, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_starts_no_gpu():
    assert setups_here() == []
    assert not torch.cuda.is_initialized()


# ------------------------------------------------------------------------------------------------------ the choice


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "ampwatch"]


def test_auto_takes_the_kernel_where_it_is_proved(proofs, caplog):
    caplog.set_level(logging.INFO, logger="ampwatch")
    proofs.add(H100, True, "equal; fast")
    taken = choose("auto", "cuda", proofs)
    assert taken[:3] == ("triton", fused.statistics_of, fused.unscale_with_statistics_)
    assert (
        weigh("auto", "cuda", proofs).why == "auto takes it, as `ampwatch doctor` has proved it on this GPU"
    )
    assert messages(caplog) == ["statistics pass: triton"]


def test_else_the_reference_and_one_line_that_names_the_command(proofs, caplog):
    assert [choose("auto", "cuda", proofs).name for _ in range(3)] == ["reference"] * 3
    assert messages(caplog) == [
        "ampwatch: statistics are taken by plain torch, which is slow on a GPU: "
        f"the Triton kernel has not been tried on this NVIDIA H100: {TRY_IT}."
    ]


def test_it_is_said_once_on_each_machine(proofs, caplog, monkeypatch):
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        choose("auto", "cuda", proofs)
    assert len(messages(caplog)) == 1


def test_on_the_cpu_no_proof_is_asked_for():
    def never():
        raise AssertionError("asked")

    assert weigh("auto", "cpu", Proofs(setups=never)).warning == ""


# ------------------------------------------------------------------------------------------- a failure in training


def broken(error):
    def compute(*_):
        raise error

    return compute


@pytest.mark.parametrize(
    ("error", "withdrawn"),
    [
        (TypeError("no kernel today"), True),
        (Touched(TypeError("no kernel today")), True),
        (torch.OutOfMemoryError("of the job"), False),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), False),
    ],
)
def test_what_fails_in_training_is_tried_again_first(error, withdrawn, proofs, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    proofs.add(H100, True, "equal; fast")
    taken = choose("auto", "cuda", proofs)
    made = Pass(taken._replace(compute=broken(error)), MemoryRecorder())
    grads = [torch.tensor([3.0])]
    assert torch.equal(made.read([grads])[0], reference.statistics_of(grads))
    failed = "(it has failed in training: TypeError('no kernel today'))"
    assert (failed in (proofs.obstacle() or "")) == withdrawn
    assert (made.name, choose("auto", "cuda", proofs).name) == (
        "reference",
        "reference" if withdrawn else "triton",
    )


# ------------------------------------------------------------------------------------------------------- the trial


def verdict_on(tried, *times_us):
    """With a clock that tells these times of torch's pass, the tried one and the reference."""
    ticks = iter(times_us)
    cases = trial.cases("cpu", [torch.float32], large=1000, many=3)
    return trial.verdict(tried, "cpu", lambda _: next(ticks), cases)


def by_reference(grads, found_inf, inv_scale):
    rows = reference.statistics_of(grads)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
    return rows


RIGHT = Statistics("triton", reference.statistics_of, by_reference)


def test_what_is_right_and_fast_holds_with_its_times():
    assert verdict_on(RIGHT, 100, 140, 9000) == (
        True,
        "equal to its definition in 6 lists of gradients; 28 M elements take 140 us, torch's own pass 100 us, "
        "and the reference 9,000 us more",
    )


def test_what_is_slower_than_torch_and_the_reference_does_not_hold():
    assert verdict_on(RIGHT, 100, 300, 200).says.startswith("equal to its definition, but not worth it: ")


def altered(change):
    def compute(grads):
        rows = reference.statistics_of(grads)
        change(grads, rows)
        return rows

    return RIGHT._replace(compute=compute)


def one_more_zero(grads, rows):
    if len(grads) == 1:
        rows[:, 3] += 1


def misaligned(grads, rows):
    for grad, row in zip(grads, rows, strict=True):
        if grad.data_ptr() % 16:
            row[-1] += 1


def inexact(grads, rows):
    rows[:, 9] *= 1 + 2e-5


WRONG = {
    "1,000 elements of float32: statistics are not what": altered(one_more_zero),
    "float32 of many sizes, and at odd addresses: statistics are not what": altered(misaligned),
    "any bits of float32: sum_sq is not what": altered(inexact),
    "it has failed: TypeError('does not compile')": RIGHT._replace(
        compute=broken(TypeError("does not compile"))
    ),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_is_wrong_does_not_hold(says):
    found = verdict_on(WRONG[says], 1, 1, 1)
    assert (found.holds, found.says.startswith(says)) == (False, True)


def test_unscaling_that_flushes_subnormals_does_not_hold():
    def flushing(grads, found_inf, inv_scale):
        rows = by_reference(grads, found_inf, inv_scale)
        for grad in grads:
            grad[grad.abs() < 2.0**-126] = 0
        return rows

    assert verdict_on(RIGHT._replace(unscale=flushing), 1, 1, 1).says == (
        "any bits of float32, by 1.52588e-05: gradients are not unscaled as torch does"
    )


# ------------------------------------------------------------------------------------------------------ the doctor


def test_the_doctor_leaves_a_proof_for_each_gpu(tmp_path):
    proofs = of(tmp_path, A100, H100)
    found = [doctor.Tried(A100, True, "equal; fast"), doctor.Tried(H100, False, "sum_sq is wrong")]
    state, says = doctor.proved(found, proofs)
    assert (state, says) == (
        "failed",
        "on NVIDIA A100 with Triton 3.9.0 equal; fast; on NVIDIA H100 with Triton 3.9.0 sum_sq is wrong",
    )
    assert "(sum_sq is wrong)" in proofs.obstacle()
    assert doctor.proved(found[:1], of(tmp_path, A100))[0] == "ok"
    assert of(tmp_path, A100).obstacle() is None


def test_a_proof_that_cannot_be_kept_is_a_failure(tmp_path):
    (tmp_path / "file").touch()
    state, says = doctor.proved([doctor.Tried(H100, True, "equal; fast")], of(tmp_path / "file"))
    assert state == "failed"
    assert says.endswith("set XDG_CACHE_HOME, else `auto` stays with the reference")
