"""The report: one file, whose policy lets its own scripts run and nothing else."""

import base64
import hashlib
import re

from ampwatch_dashboard.report import report

EVIL = "</script><script>alert(1)</script><!-- 2^16"
PLOTLY = 'const a = "</script>", b = "<!--";'


def written(config=EVIL):
    verdict = {"word": "failing", "sentence": EVIL, "severity": "fatal"}
    run = {"run": "r", "name": EVIL, "project": EVIL, "status": "live", "last_seen": 0.0, "world_size": 1}
    run |= {"attempts": 4, "skipped": 1, "scale": 65536.0, "loss": "NaN", "step": 3, "verdict": verdict}
    run |= {"versions": {EVIL: EVIL}, "config": {"a": config}, "scalers": [], "optimizers": []}
    run["producers"] = [{"rank": 0, "producer": "ab" * 16, "host": EVIL, "device": EVIL, "attempts": 4}]
    finding = {"severity": "fatal", "kind": "spike", "headline": EVIL, "state": "open", "confidence": 0.9}
    finding |= {"evidence": [{"text": EVIL}], "advice": [{"text": EVIL, "code": EVIL}]}
    finding |= {"first_step": 1, "last_step": 2}
    event = {"step": -1, "attempt": 2, "type": "skip", "data": {EVIL: EVIL}}
    figures = {"Timeline": {"data": [{"name": EVIL, "x": [1]}], "layout": {}}}
    return report(run, [finding], {"items": [event], "next": None}, figures, PLOTLY)


def test_names_stay_text():
    page = written()
    assert page.count("</script>") == 3
    assert page.count("<script") == 3
    assert "alert(1)</script>" not in page
    assert "<!--" not in page
    assert "2<sup>16</sup>" in page


def test_the_policy_names_the_scripts_that_are_there():
    page = written()
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert f"script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}';" in page
    assert "default-src 'none'" in page


def test_what_a_job_tells_of_itself_makes_no_report_of_megabytes():
    assert len(written("x" * 5_000_000)) - len(written()) < 25_000


def test_no_number_is_said_as_one():
    page = written()
    assert "<dt>Loss now</dt><dd>NaN</dd>" in page
    assert "<dt>Steps skipped</dt><dd>25 % <small>1 of 4</small></dd>" in page
    assert "<td>–</td><td>2</td><td>skip</td>" in page
