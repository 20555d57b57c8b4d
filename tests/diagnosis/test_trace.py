"""Traces of trainings that were not recorded."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ampwatch.diagnosis import diagnose, diagnose_run, read_trace
from ampwatch.diagnosis.trace import POLICIES
from ampwatch.errors import InvalidBatch, RunNotFound
from ampwatch.replay.policies import POLICIES as EXACT
from ampwatch.replay.simulate import simulate


def csv_of(path: Path, *columns: list[object], names: str = "attempt scale found_inf loss") -> Path:
    rows = zip(*columns, strict=True)
    lines = [",".join(names.split()), *(",".join(map(str, row)) for row in rows)]
    file = path / "trace.csv"
    file.write_text("\n".join(lines))
    return file


def scales(start: float, skipped: list[int], hysteresis: int = 1, floor: float = 0.0) -> list[float]:
    """The scale of each attempt: halved at every so-manieth skip."""
    found, left = [], hysteresis
    for skip in skipped:
        found.append(start)
        left -= skip
        if skip and left <= 0:
            start = max(start / 2, floor)
    return found


def kinds(path: Path, policy: str = "torch") -> list[tuple[str, str]]:
    found = [finding.as_dict() for finding in diagnose(path, policy)]  # as it is printed with --json
    return [(each["kind"], each["severity"]) for each in found]


def test_attempt_and_scale_are_enough(tmp_path):
    file = csv_of(
        tmp_path, list(range(40)), [2.0 ** (32 - min(i, 12)) for i in range(40)], names="attempt scale"
    )
    (finding,) = diagnose(file)
    assert (finding.kind, finding.last_attempt) == ("calibration", 11)


def test_json_lines_say_the_same(tmp_path):
    skips = [1] * 3 + [0] * 20
    file = csv_of(tmp_path, list(range(23)), scales(2.0**16, skips), skips, [1.0] * 23)
    lines = [
        {"attempt": i, "loss_scale": s, "overflow": bool(k), "loss": 1.0}
        for i, (s, k) in enumerate(zip(scales(2.0**16, skips), skips, strict=True))
    ]
    other = tmp_path / "trace.jsonl"
    other.write_text("\n".join(map(json.dumps, lines)))
    assert [f.headline for f in diagnose(file)] == [f.headline for f in diagnose(other)]


def test_two_skips_in_a_row_are_one_probe_with_hysteresis_2(tmp_path):
    """6 skips at the start, two more at 500: DeepSpeed's."""
    skips = [1] * 6 + [0] * 494 + [1] * 4 + [0] * 100
    path = csv_of(tmp_path, list(range(604)), scales(2.0**16, skips, 2), skips, [1.0] * 604)
    assert kinds(path, "deepspeed") == [("growth_probe", "info"), ("calibration", "info")]
    assert sorted(kinds(path)) == [("calibration", "info"), ("spike", "info")]


def test_a_floor_is_told_as_one(tmp_path):
    """Keras 2: the scale stays at 1, and nothing is said by the framework."""
    skips = [0] * 50 + [1] * 40
    path = csv_of(tmp_path, list(range(90)), scales(2.0**15, skips, floor=1.0), skips, [1.0] * 90)
    assert kinds(path, "keras2") == [("scale_floor", "fatal")]


def test_a_norm_that_explodes_and_one_that_does_not(tmp_path):
    """The same path of the scale: one training diverges, the other has a summed loss."""
    grows = [1.0] * 60 + [1.4**i for i in range(30)]
    skips = [0] * 75 + [0, 1, 0] * 5
    names = "attempt scale found_inf loss grad_norm"
    diverging = csv_of(tmp_path, list(range(90)), scales(0.25, skips), skips, grows, grows, names=names)
    assert kinds(diverging)[0] == ("divergence", "fatal")
    flat = csv_of(
        tmp_path,
        list(range(90)),
        scales(0.25, skips),
        skips,
        [9 - 0.05 * i for i in range(90)],
        [1.0] * 90,
        names=names,
    )
    assert [k for k, severity in kinds(flat) if severity != "info"] == []


def test_a_loss_that_is_nan(tmp_path):
    skips = [0] * 50 + [1] * 12
    path = csv_of(tmp_path, list(range(62)), scales(2.0**16, skips), skips, [1.0] * 50 + [math.nan] * 12)
    assert kinds(path) == [("nonfinite_forward", "fatal")]


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (["nan"], [("bad_batch", "warning")]),
        (["nan", 1.0, "nan"], [("bad_batch", "warning")]),  # it may hold a mean over no target
        (["nan", "nan", "nan"], [("cleaned_gradients", "error")]),
    ],
)
def test_what_was_cleaned_shows_in_a_trace_where_it_lasts(tmp_path, broken, expected):
    names = "attempt scale found_inf loss grad_norm"
    losses = [1.0] * 20 + broken + [1.0] * (6 - len(broken))
    path = csv_of(tmp_path, list(range(26)), [1024] * 26, [0] * 26, losses, [0.5] * 26, names=names)
    assert kinds(path) == expected


def test_batches_are_named_by_a_trace(tmp_path):
    losses = ["inf" if i % 30 == 17 else 1.0 for i in range(80)]
    skips = [int(loss == "inf") for loss in losses]
    batches = [i % 30 for i in range(80)]
    path = csv_of(
        tmp_path,
        list(range(80)),
        scales(2.0**16, skips),
        skips,
        losses,
        batches,
        names="attempt scale found_inf loss batch_id",
    )
    assert "Batch 17" in diagnose(path)[0].headline


def test_ranks_are_told_apart(tmp_path):
    file = csv_of(tmp_path, [0, 0, 1, 1], [8, 8, 8, 8], [0, 1, 0, 1], names="attempt scale rank")
    assert len({batch.producer for batch in read_trace(file).batches}) == 2


def test_what_cannot_be_judged_is_said(tmp_path):
    file = csv_of(tmp_path, [0, 1], [8, 8], names="attempt scale")
    assert [text.split("`")[1] if "`" in text else text[:18] for text in read_trace(file).not_judged] == [
        "found_inf",
        "loss",
        "grad_norm",
        "lr",
        "batch_id",
        "A trace never tell",
    ]
    assert any("hysteresis" in text for text in read_trace(file, "megatron").not_judged)


def test_half_a_gradient_at_each_growth_is_explained_where_the_policy_does_that(tmp_path):
    columns = [list(range(60)), [2.0 ** (12 + i // 20) for i in range(60)], [0] * 60, [2.0] * 60]
    path = csv_of(
        tmp_path,
        *columns,
        [0.5 if i % 20 == 19 else 1.0 for i in range(60)],
        names="attempt scale found_inf loss grad_norm",
    )
    assert kinds(path, "deepspeed") == [("unscaled_by_new_scale", "info")]
    assert kinds(path, "megatron") == []


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("attempt,loss\n0,1\n", "line 1.scale"),
        ("a;b\n0;1\n", "line 1.attempt"),
        ("attempt,scale\n0,-1\n", "line 2.scale"),
        ("attempt,scale\n0,nan\n", "line 2.scale"),
        ("attempt,scale\n0,\n", "line 2.scale"),
        ("attempt,scale\n1e30,1\n", "line 2.attempt"),
        ("attempt,scale,rank\n0,1,nan\n", "line 2.rank"),
        ("attempt,scale,rank\n0,1,-1\n", "line 2.rank"),
        ("attempt,scale\n0.5,1\n", "line 2.attempt"),
        ("attempt,scale\n-1,1\n", "line 2.attempt"),
        ("attempt,scale\nx,1\n", "line 2.attempt"),
        ("attempt,scale\n", "trace"),
        ("", "trace"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, text, field):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InvalidBatch) as caught:
        diagnose(path)
    assert caught.value.field.removeprefix(f"{path}, ") == field
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("line", ["{", "[1]", '{"attempt": 0}'])
def test_a_line_that_is_no_attempt_is_named(tmp_path, line):
    (tmp_path / "t.jsonl").write_text('{"attempt": 0, "scale": 1}\n' + line + "\n")
    with pytest.raises(InvalidBatch, match="line 2"):
        diagnose(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.json", "[" * 100_000),
        ("t.jsonl", '{"attempt": 0, "scale": ' + "[" * 100_000),
        ("t.csv", "attempt,scale,note\n0,1," + "x" * 200_000),
    ],
)
def test_what_no_reader_goes_through_is_told_as_that(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidBatch, match=re.escape(name)):
        diagnose(tmp_path / name)


def test_an_integer_beyond_the_reals_is_infinite(tmp_path):
    (tmp_path / "t.jsonl").write_text(f'{{"attempt": 0, "scale": 1, "loss": {10**400}}}\n')
    (batch,) = (batch for batch in read_trace(tmp_path / "t.jsonl").batches if batch.kind == "attempts")
    assert batch.table()["loss"].tolist() == [math.inf]


def test_a_policy_or_a_file_that_does_not_exist(tmp_path):
    (tmp_path / "t.csv").write_text("attempt,scale\n0,1\n")
    with pytest.raises(InvalidBatch, match="it must be one of torch, apex"):
        diagnose(tmp_path / "t.csv", "amp")
    with pytest.raises(RunNotFound):
        diagnose(tmp_path / "nothing.csv")


def test_a_verdict_of_a_trace(tmp_path):
    file = csv_of(tmp_path, list(range(30)), [1024] * 30, [0] * 30, [1.0] * 30)
    assert diagnose_run(file).verdict().sentence == "Healthy: 30 steps taken, 0 skipped; loss scale 2^10."


def test_every_policy_is_in_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in POLICIES if f"`{name}`" not in page] == []


def told(path: Path, text: str, policy: str = "torch") -> tuple[str, list[str]]:
    """The verdict's sentence, and what was not judged beside what a trace without more never tells."""
    file = path / "trace"
    file.write_text(text)
    always = read_trace(csv_of(path, [0], [1], [0], [1.0], [1.0], [1.0], [1], names=EVERYTHING)).not_judged
    assert len(always) == 1
    found = read_trace(file, policy)
    return diagnose_run(file, policy).verdict().sentence, [s for s in found.not_judged if s not in always]


EVERYTHING = "attempt scale found_inf loss grad_norm lr batch_id"
ROWS = [(i, 2.0 ** (16 - min(i, 3)), i < 3, 1.5, 0.5, 1e-3, i % 7) for i in range(40)]
HEALTHY = "Healthy: 37 steps taken, 3 skipped (ordinary for loss scaling); loss scale 2^13."


def table(header: str, mark: str = ",", end: str = "\n") -> str:
    return end.join([header, *(mark.join(map(str, row)) for row in ROWS)])


@pytest.mark.parametrize(
    "text",
    [
        table("attempt,scale,found_inf,loss,grad_norm,lr,batch_id"),
        table("attempt,scale,found_inf,loss,grad_norm,lr,batch_id", end="\r\n") + "\r\n\r\n",
        table("Iteration; Loss Scale; Skipped; LM loss; Grad Norm; Learning Rate; Batch", ";").replace(
            ".", ","
        ),
        table("global_step\ttrain/loss_scale\toverflow\ttrain/loss\tgnorm\tlr\tbatch_idx", "\t"),
        table(
            '"_step","amp_scale","is_overflow","train/loss","train/grad_norm","train/learning_rate","batch"'
        ),
        json.dumps([dict(zip(EVERYTHING.split(), row, strict=True)) for row in ROWS], indent=1),
        "\n".join(
            json.dumps(dict(zip(EVERYTHING.split(), row, strict=True)) | {"eval/loss": None}) for row in ROWS
        ),
    ],
)
def test_the_same_trace_as_people_have_it(tmp_path, text):
    assert told(tmp_path, text) == (HEALTHY, [])


def test_a_name_of_ours_goes_before_an_alias_and_training_before_evaluation(tmp_path):
    text = "eval/loss,loss_scale,attempt,scale,step,train/loss\n" + "\n".join(
        f"nan,1,{i},1024,{7 * i},1.5" for i in range(30)
    )
    assert told(tmp_path, text)[0] == "Healthy: 30 steps taken, 0 skipped; loss scale 2^10."


def test_what_a_trace_holds_and_cannot_be_read_is_said(tmp_path):
    """Words beside a number, and a job that was killed as it wrote."""
    lines = [
        json.dumps(
            {
                "attempt": 10 * i,
                "scale": 8,
                "found_inf": 0,
                "loss": "1.5 (smooth)",
                "lr": 1,
                "norm": 1,
                "batch": 1,
            }
        )
        for i in range(30)
    ]
    assert told(tmp_path, "\n".join(lines) + '\n{"attempt": 300, "sca')[1] == [
        "`loss` is no number in 30 rows, as '1.5 (smooth)'.",
        "The last line is cut off, and left out.",
        "Only 30 of 291 attempts are in the trace: what happened between them is not seen.",
        "Without `loss`: losses that are not finite, divergence, sums that explain a scale below 1.",
    ]


SCALES = [2.0 ** (16 - min(i, 2)) for i in range(20)]
READ = {
    "a byte order mark, Windows' line ends and capitals": (
        "t.csv",
        "\ufeffStep,Loss Scale,Train/Loss\r\n" + "".join(f"{i},{s},1.5\r\n" for i, s in enumerate(SCALES)),
        "Read: `Step` as attempt, `Train/Loss` as loss, `Loss Scale` as scale.",
    ),
    "thousands": (
        "t.csv",
        "step,scale,note\n" + "".join(f'"{i + 1000:,}","{s:,}",x\n' for i, s in enumerate(SCALES)),
        "Read: `step` as attempt. Not used: `note`.",
    ),
    "Weights & Biases, two runs' names before the keys": (
        "wandb_export.csv",
        '"Step","calm-sun-7 - loss_scale","calm-sun-7 - loss_scale__MIN"\n'
        + "".join(f'"{i}","{s}","{s}"\n' for i, s in enumerate(SCALES)),
        "Read: `Step` as attempt, `calm-sun-7 - loss_scale` as scale. Not used: `calm-sun-7 - loss_scale__MIN`.",
    ),
    "TensorBoard, a tag in a file of its own": (
        "run-1-tag-train_loss_scale.csv",
        "Wall time,Step,Value\n" + "".join(f"{1.7e9 + i},{i},{s}\n" for i, s in enumerate(SCALES)),
        "Read: `Step` as attempt, `loss_scale` as scale. Not used: `Wall time`.",
    ),
    "comments, and the header again where the job was begun again": (
        "t.csv",
        "# exported\nstep scale\n"
        + "".join(("step scale\n" if i == 9 else "") + f"{i} {s}\n" for i, s in enumerate(SCALES)),
        "Read: `step` as attempt.",
    ),
    "tensors as they print": (
        "t.jsonl",
        "".join(f'{{"step": {i}, "scale": "tensor({s}, device=\'cuda:0\')"}}\n' for i, s in enumerate(SCALES)),
        "Read: `step` as attempt.",
    ),
    "fairseq": (
        "train.log",
        "2024-01-01 | INFO | fairseq.trainer | begin training epoch 1\n"
        + "".join(f'x | INFO | train_inner | {{"num_updates": "{i}", "loss_scale": "{s}"}}\n' for i, s in enumerate(SCALES)),
        "Read: `num_updates` as attempt, `loss_scale` as scale.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_tools_leave_is_read_and_said_what_for(tmp_path, name):
    file, text, read = READ[name]
    (tmp_path / file).write_bytes(text.encode())
    trace = read_trace(tmp_path / file)
    (rows,) = (batch.table() for batch in trace.batches if batch.kind == "attempts")
    assert (trace.read, rows["scale"].tolist()) == (read, SCALES)


def test_a_table_of_windows_in_utf_16(tmp_path):
    (tmp_path / "t.csv").write_bytes("step,scale\r\n0,8\r\n1,4\r\n".encode("utf-16"))
    assert [f.kind for f in diagnose(tmp_path / "t.csv")] == ["calibration"]


def test_a_log_of_megatron_tells_the_scale_that_an_iteration_leaves(tmp_path):
    line = " [x] iteration {i:8d}/ 500 | learning rate: 1.500E-04 | lm loss: {loss} | loss scale: {scale} | number of skipped iterations: {skip} |"
    skips = [1, 1, *[0] * 30]
    left = [2.0**15, 2.0**14, *[2.0**14] * 30]
    lines = [
        line.format(i=i + 1, loss="7.0E+00", scale=s, skip=k)
        for i, (s, k) in enumerate(zip(left, skips, strict=True))
    ]
    (tmp_path / "train.log").write_text("\n".join(["training ...", *lines, "done"]))
    trace = read_trace(tmp_path / "train.log", "megatron")
    (rows,) = (batch.table() for batch in trace.batches if batch.kind == "attempts")
    assert rows["scale_after"].tolist() == left
    assert rows["scale"].tolist() == [2.0**15, *left[:-1]]
    assert rows["found_inf"].tolist() == skips
    assert trace.not_judged[0] == "2 lines of the log tell no attempt, and are left out."


def test_a_log_that_tells_skips_only_is_refused_with_what_to_write(tmp_path):
    for line in (
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        "[2023-06-01] [INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    ):
        (tmp_path / "train.log").write_text(f"Epoch 1\n{line}\n" * 2)
        with pytest.raises(InvalidBatch, match=r"in 2 lines that a step was skipped.*header step,scale,loss"):
            diagnose(tmp_path / "train.log")


@pytest.mark.parametrize("word", ["NaN", "-nan", "nan(ind)", "-nan(ind)", "1.#QNAN", "1.#IND", "tensor(nan)"])
def test_nan_as_it_is_spelt(tmp_path, word):
    (tmp_path / "t.csv").write_text("step,scale,loss\n" + f"0,8,1\n1,8,{word}\n2,8,{word}\n")
    assert [f.kind for f in diagnose(tmp_path / "t.csv")] == ["nonfinite_forward"]


@pytest.mark.parametrize(
    ("word", "number"), [("1.#INF", math.inf), ("-Infinity", -math.inf), ("+inf", math.inf), ("∞", math.inf)]
)
def test_infinity_as_it_is_spelt(tmp_path, word, number):
    (tmp_path / "t.csv").write_text(f"step,scale,loss\n0,8,{word}\n")
    (rows,) = (batch.table() for batch in read_trace(tmp_path / "t.csv").batches if batch.kind == "attempts")
    assert rows["loss"].tolist() == [number]


def test_micro_batches_that_repeat_a_step_are_counted(tmp_path):
    text = "step,scale\n" + "\n".join(f"{i // 2},1024" for i in range(60))
    sentence, notes = told(tmp_path, text)
    assert sentence == "Healthy: 60 steps taken, 0 skipped; loss scale 2^10."
    assert notes[0] == "Attempts repeat in the trace, so that its rows are counted in their order."


def descent(attempts: int, skips: int, first: int = 0) -> list[str]:
    return [f"{first + i},{2.0 ** (16 - min(i, skips))},{int(i < skips)},1.5" for i in range(attempts)]


@pytest.mark.parametrize("first", [200, 0])
def test_a_scaler_that_began_anew_is_told_as_one(tmp_path, first):
    """Resumed, and appended to the same file: counted on, or from 0 again."""
    file = tmp_path / "trace.csv"
    file.write_text("\n".join(["attempt,scale,found_inf,loss", *descent(200, 8), *descent(120, 8, first)]))
    findings = diagnose(file)
    assert [(f.kind, f.severity, f.first_attempt) for f in findings] == [
        ("scaler_state_lost", "warning", 200),
        ("calibration", "info", 0),
    ]


@pytest.mark.parametrize("growth", [2.0, 4.0])
def test_a_growth_back_to_the_first_scale_is_none(tmp_path, growth):
    file = tmp_path / "trace.csv"
    rows = [f"{i},{1024.0 if i % 20 == 0 else 1024.0 / growth},{int(i % 20 == 0)}" for i in range(200)]
    file.write_text("\n".join(["attempt,scale,found_inf", *rows]))
    assert {f.kind for f in diagnose(file) if f.severity != "info"} <= {"many_optimizers"}


def test_found_inf_may_be_a_count_of_ranks_or_a_word(tmp_path):
    for yes, no in [("8.0", "0.0"), ("yes", "no"), ("True", "False"), ("-1", "0")]:
        rows = [f"{i},{2.0 ** (10 - (i > 20))},{yes if i == 20 else no},1.5" for i in range(60)]
        (tmp_path / "trace.csv").write_text("\n".join(["attempt,scale,overflow,loss", *rows]))
        assert kinds(tmp_path / "trace.csv") == [("growth_probe", "info")]


def test_a_blank_found_inf_is_told_by_the_scale(tmp_path):
    rows = [f"{i},{2.0 ** (10 - (i > 20))},{'' if i == 20 else 0},1.5" for i in range(60)]
    (tmp_path / "trace.csv").write_text("\n".join(["attempt,scale,found_inf,loss", *rows]))
    assert kinds(tmp_path / "trace.csv") == [("growth_probe", "info")]


def by_policy(path: Path, policy: str, ceilings: np.ndarray, loss: Callable[[int], float]) -> Path:
    """The trace that the policy leaves over attempts with these ceilings, up to where it raises."""
    ran = simulate(EXACT[policy](), ceilings)
    lost = set(ran.lost.tolist())
    attempts = range(max(lost) + 1 if ran.stopped else len(ceilings))
    scales = [float(ran.scale[np.searchsorted(ran.at, a, "right") - 1]) for a in attempts]
    rows = (f"{a},{scale!r},{int(a in lost)},{loss(a)}" for a, scale in zip(attempts, scales, strict=True))
    (path / "trace.csv").write_text("\n".join(["attempt,scale,found_inf,loss", *rows]))
    return path / "trace.csv"


def ceilings(count: int, stuck_at: int) -> np.ndarray:
    """Around 2^13, now and then a quarter of it, and from an attempt on none at all."""
    rng = np.random.default_rng(0)
    found = 2.0 ** (13 + 0.3 * rng.standard_normal(count))
    found[rng.random(count) < 5e-4] /= 4
    found[stuck_at:] = 0.0
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_by_each_policy_is_ordinary_until_nothing_is_taken_any_more(tmp_path, policy):
    healthy = by_policy(tmp_path, policy, ceilings(4500, 4500), lambda a: 2 - 1e-4 * a)
    assert kinds(healthy, policy) == [("growth_probe", "info"), ("calibration", "info")]
    stuck = by_policy(tmp_path, policy, ceilings(4450, 4400), lambda a: 2.0)
    (kind, _), *others = kinds(stuck, policy)
    assert kind == ("scale_floor" if policy in HELD else "no_updates")
    assert {severity for _, severity in others} == {"info"}


HELD = {"deepspeed-fp16", "megatron", "keras2", "jmp", "mindspore"}  # at a floor, and they go on
