import random
import sys
from collections.abc import Iterator
from itertools import count, zip_longest
from pathlib import Path

import pytest
import torch

from ampwatch import spool
from ampwatch.diagnosis import Diagnosis, diagnose_run
from ampwatch.records import Batch, pack_events, pack_table

sys.path.insert(0, str(Path(__file__).parent))  # loops.py, which the tests here share

PART = 7  # rows or events of a batch
ASKED = 16  # times, of a run


@pytest.fixture(autouse=True)
def same_numbers():
    """One thread and one seed, whatever ran before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_answer_in_any_order(request: pytest.FixtureRequest):
    """Whatever run a test has recorded, in small batches, late and repeated, or asked in between: its findings are the same."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is not None:
        for run in sorted({file.parent.parent for file in folder.rglob("*.awb")}):
            whole = told(diagnose_run(run))
            assert in_any_order(run) == whole
            assert asked_each_time(run) == whole


def told(diagnosis: Diagnosis) -> list[str]:
    """All that is said: as text, since a NaN in it is not equal to itself."""
    return list(map(repr, diagnosis.findings()))


def in_any_order(run: Path) -> list[str]:
    """The findings of a run whose batches come in parts, each twice, in an order of their own."""
    draw, diagnosis = random.Random(run.name), Diagnosis()
    parts = [part for batches in by_producer(run) for part in in_parts(batches)]
    for part in draw.sample([*parts, *parts], 2 * len(parts)):
        diagnosis.add(part)
        if draw.random() < 0.1:
            diagnosis.findings()
    return told(diagnosis)


def asked_each_time(run: Path) -> list[str]:
    """The findings of a run whose batches come in order, in parts, and that is asked now and then, as a live one is."""
    diagnosis = Diagnosis()
    rounds = list(zip_longest(*(in_parts(batches) for batches in by_producer(run))))
    for i, parts in enumerate(rounds):
        for part in filter(None, parts):
            diagnosis.add(part)
        if i % max(1, len(rounds) // ASKED) == 0:
            diagnosis.findings()
    return told(diagnosis)


def by_producer(run: Path) -> list[list[Batch]]:
    found: dict[str, list[Batch]] = {}
    for batch in spool.read(run):
        found.setdefault(batch.producer, []).append(batch)
    return list(found.values())


def in_parts(batches: list[Batch]) -> Iterator[Batch]:
    """The same rows and events of a producer in batches of a few."""
    numbers = count()
    for batch in batches:
        key = {"producer": batch.producer, "run": batch.run, "rank": batch.rank}
        if batch.kind == "events":
            events = batch.events()
            for start in range(0, len(events), PART):
                yield pack_events(events[start : start + PART], seq=next(numbers), **key)
            continue
        table = batch.table()
        for start in range(0, len(table["attempt"]), PART):
            some = {name: column[start : start + PART] for name, column in table.items()}
            yield pack_table(batch.kind, some, seq=next(numbers), **key)
