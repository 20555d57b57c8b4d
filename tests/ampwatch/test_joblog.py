"""What the job's own log is told: in a file, in a terminal, and where the run cannot be seen."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ampwatch import joblog, records
from ampwatch.joblog import JobLog, Place, _duration
from ampwatch.records import Event

from .spooled import PRODUCER

RUN = "01M8M6E7S4QJWD11WQEJS8BJ8M"
ORIGIN = {
    "module": "blocks.1.attention", "module_type": "Attention", "input_max_abs": 3.5, "input_n_nonfinite": 0,
    "output_n_inf": 0, "output_n_nan": 2048, "output_max_abs": 0.0, "children_max_abs": 60.0,
}  # fmt: skip


def table(count, broken=0, **columns):
    """So many attempts, 50 ms apart, of which the last ones break."""
    attempt = np.arange(count)
    bad = attempt >= count - broken
    made = {
        "attempt": attempt, "step": np.minimum(attempt, count - broken), "time": 1e9 + 0.05 * attempt,
        "scale": np.full(count, 2.0**16), "scale_after": np.where(bad, 2.0**15, 2.0**16), "found_inf": bad,
        "stepped": np.ones(count, np.int64), "skipped": bad.astype(np.int64),
        "loss": np.where(bad, np.nan, np.linspace(2.5, 0.5, count)),
    }  # fmt: skip
    return made | columns


def log_of(rows, *events, speaks=True):
    log = JobLog(speaks)
    log.count(rows)
    key = {"producer": PRODUCER, "run": RUN, "rank": 0}
    batches = [records.pack_events(events, seq=0, **key), records.pack_table("attempts", rows, seq=1, **key)]
    log.add(batches, pytest.fail)
    log.judge(pytest.fail, final=True)
    return log


def failing():
    search = {"origin": ORIGIN, "path": [ORIGIN], "inputs_finite": True, "parameters_finite": True}
    event = Event("forward_search", 1e9, 100, data=search | {"outputs_finite": False})
    return log_of(table(108, broken=8), event)


OFFLINE = Place(url="", unsent_to="", directory=Path("ampwatch_runs"), run=RUN)
SERVED = Place(url=f"https://ampwatch.example.org/run/{RUN}", unsent_to="", directory=Path("runs"), run=RUN)


def said(log, place, capsys):
    assert log.say_verdict(place)
    return capsys.readouterr().err.splitlines()


def test_a_healthy_run_says_how_it_went_and_where_to_see_it(capsys):
    lines = said(log_of(table(100)), OFFLINE, capsys)
    assert lines[0].startswith("ampwatch: healthy: 100 steps taken, 0 skipped")
    assert lines[1:] == [
        "ampwatch: loss 2.5 → 0.5 in 4.95 s, 50 ms a step",
        "ampwatch: to see it: ampwatch serve ampwatch_runs",
    ]


def test_a_failing_run_says_what_to_do_and_where_the_evidence_is(capsys):
    first, second, third = said(failing(), OFFLINE, capsys)
    assert first.startswith("ampwatch: failing: Values inside blocks.1.attention exceed float16")
    assert second.startswith("ampwatch: to do: ")
    assert third == f"ampwatch: evidence, and code to paste: ampwatch diagnose ampwatch_runs/{RUN}"


def test_a_run_on_a_server_gives_its_page(capsys):
    assert said(failing(), SERVED, capsys)[2] == f"ampwatch: evidence, and code to paste: {SERVED.url}"
    assert said(log_of(table(9)), SERVED, capsys)[2] == f"ampwatch: to see it: {SERVED.url}"


@pytest.mark.parametrize(
    ("place", "line"),
    [
        (
            Place("", "https://a.example", Path("runs"), RUN),
            "not all of it has reached https://a.example; to see it: ampwatch serve runs",
        ),
        (
            Place("", "https://a.example", None, RUN),
            "not all of it has reached https://a.example; nothing of it is kept on this machine",
        ),
        (Place("", "", None, RUN), "nothing of it is kept on this machine"),
        (
            Place("", "", Path("runs"), RUN, part="up to where writing failed"),
            "to see it, up to where writing failed: ampwatch serve runs",
        ),
    ],
)
def test_where_a_run_is_that_could_not_be_kept_as_it_should(place, line, capsys):
    assert said(log_of(table(9)), place, capsys)[2] == f"ampwatch: {line}"


def test_without_losses_and_times_the_attempts_are_counted(capsys):
    rows = table(1)
    del rows["loss"], rows["time"]
    assert said(log_of(rows), OFFLINE, capsys)[1] == "ampwatch: 1 attempt"


def test_in_a_terminal_lines_break_between_words_and_the_word_is_coloured(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    lines = said(failing(), OFFLINE, capsys)
    assert lines[0].startswith("ampwatch: \x1b[31mfailing\x1b[0m: Values inside blocks.1.attention")
    assert max(map(len, lines)) <= 80 + len("\x1b[31m\x1b[0m")
    assert {line[:10] for line in lines} == {"ampwatch: ", " " * 10}
    assert lines[-1] == f"          ampwatch diagnose ampwatch_runs/{RUN}"


def test_colours_can_be_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert said(log_of(table(9)), OFFLINE, capsys)[0].startswith("ampwatch: healthy: ")


def test_nothing_is_said_without_attempts_or_where_another_speaks(capsys):
    assert not JobLog(True).say_verdict(OFFLINE)
    assert not log_of(table(9), speaks=False).say_verdict(OFFLINE)
    assert capsys.readouterr().err == ""


def test_what_ends_a_job_in_its_first_attempt_is_said(capsys):
    refused = {"fault": "step_twice", "optimizer": 0, "order": ["step", "step"], "raised": True}
    log = JobLog(True)
    batch = records.pack_events(
        [Event("call_fault", 1e9, 0, data=refused)], seq=0, producer=PRODUCER, run=RUN, rank=0
    )
    log.add([batch], pytest.fail)
    log.judge(pytest.fail, final=True)
    first, second, third = said(log, OFFLINE, capsys)
    assert first.startswith("ampwatch: failing: ")
    assert second.startswith("ampwatch: to do: ")
    assert third == f"ampwatch: evidence, and code to paste: ampwatch diagnose ampwatch_runs/{RUN}"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0123, "12.3 ms"),
        (12.34, "12.3 s"),
        (59.7, "1 min 0 s"),
        (72, "1 min 12 s"),
        (11100, "3 h 5 min"),
        (2e5, "2 d 7 h"),
    ],
)
def test_durations(seconds, said):
    assert _duration(seconds) == said


class Clock:
    """Time that passes when a test says so; of CPU time each judging takes 10 ms."""

    def __init__(self):
        self.now, self.cpu = 100.0, 0.0

    def monotonic(self):
        return self.now

    def thread_time(self):
        self.cpu += 0.01
        return self.cpu


@pytest.fixture
def judged(monkeypatch):
    """A log whose judgings are counted, on a clock of the test's."""
    clock, counted = Clock(), []
    monkeypatch.setattr(joblog, "time", clock)
    log = JobLog(True)
    findings = log._diagnosis.findings
    monkeypatch.setattr(log._diagnosis, "findings", lambda: [counted.append(clock.now), *findings()][1:])

    def at(seconds, skipped=0, final=False, **columns):
        clock.now += seconds
        log.count(table(10, broken=skipped, **columns))
        log.judge(pytest.fail, final=final)
        return len(counted)

    return at


def test_judging_waits_until_it_is_a_small_share_of_the_time(judged):
    assert [judged(0), judged(0)] == [1, 2]  # the first, which imports, is not counted
    assert [judged(0.01 / joblog.SHARE - 1), judged(1.1)] == [2, 3]


@pytest.mark.parametrize("trouble", [{"skipped": 2}, {"loss": np.full(10, np.inf)}])
def test_judging_is_more_frequent_in_trouble_and_never_left_out_at_the_end(judged, trouble):
    assert [judged(0), judged(0)] == [1, 2]
    assert [
        judged(0.5 * 0.01 / joblog.SHARE_IN_TROUBLE, **trouble),
        judged(0.6 * 0.01 / joblog.SHARE_IN_TROUBLE),
    ] == [2, 3]
    assert [judged(0), judged(0, final=True)] == [3, 4]


def test_nothing_is_diagnosed_where_there_is_nobody_to_tell(monkeypatch):
    from ampwatch.diagnosis.engine import Diagnosis

    monkeypatch.setattr(Diagnosis, "add", lambda *_: pytest.fail("diagnosed"))
    log = log_of(table(9), speaks=False)
    assert log.counts["attempts"] == 9
    assert not log._failed
