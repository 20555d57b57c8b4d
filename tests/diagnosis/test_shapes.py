"""What any client may put into an event neither ends a diagnosis nor changes it; what ampwatch records always fits."""

import itertools
import math

import pytest
from build import Run

import ampwatch
from ampwatch import spool
from ampwatch.demo.train import Plan, train
from ampwatch.diagnosis.shapes import SHAPES, fits
from ampwatch.records import Event
from ampwatch.settings import Settings

JUNK = [None, "\x00<b>&", 2**63, -1, math.nan, True, [None], [[]], {"a": None}, {"-1": 1, "\u00b2": 1}]
FIELDS = sorted({name for shape in SHAPES.values() for name in shape.__annotations__})


def junk(kind: str) -> list[Event]:
    flat = [{field: value} for field, value in itertools.product(FIELDS, JUNK)]
    nested = [{kind: [{"id": 0} | data]} for data in flat] if kind in ("tensors", "optimizers") else []
    return [Event(kind, 1e9, attempt=2, data=data) for data in [*flat, *nested]]


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_junk_does_not_end_a_diagnosis(kind):
    run = Run().clean(3).broken(12)
    run.events += junk(kind)
    assert run.findings()[0].severity == "fatal"


@pytest.mark.parametrize("key", ["9" * 5000, "\u00b2", "-1", "", "1.0"])
def test_the_id_of_a_tensor_is_a_number(key):
    assert not fits(Event("origin", 0.0, data={"origins": {key: "float16"}}))
    assert fits(Event("origin", 0.0, data={"origins": {"7": "float16"}}))


def test_a_field_that_nobody_knows_is_free():
    assert fits(Event("scaler", 0.0, data={"scaler": 0, "colour": ["red"]}))


def test_all_that_a_run_records_fits(tmp_path):
    train(Plan("x", 60, 0, overflow_at=20), settings=Settings.load(run="x", dir=tmp_path, quiet=True))
    ampwatch.finish()
    events = [e for batch in spool.read(tmp_path) if batch.kind == "events" for e in batch.events()]
    assert {"run", "scaler", "tensors", "origin", "forward_search", "finite_check"} <= {
        e.type for e in events
    }
    assert [event for event in events if not fits(event)] == []
