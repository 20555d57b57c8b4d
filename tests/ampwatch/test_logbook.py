"""What is logged: which attempt it belongs to, and what counts as a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ampwatch.logbook import Logbook


@pytest.fixture
def book():
    return Logbook()


def iterations(book, *, top=(), under_way=(), after=(), count=3):
    """A training loop that logs its number under these names; what each attempt got."""
    entries = []
    for i in range(count):
        for name in top:
            book.add(name, i)
        book.begin()
        for name in under_way:
            book.add(name, i)
        entries.append(book.end())
        for name in after:
            book.add(name, i)
    return [entry.close() for entry in entries]


@pytest.mark.parametrize("place", ["top", "under_way", "after"])
def test_a_name_belongs_to_its_iteration(book, place):
    assert iterations(book, **{place: ["step"]}) == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_names_are_told_apart(book):
    got = iterations(book, top=["batch_id"], under_way=["loss"], after=["reward"])
    assert got == [{"batch_id": float(i), "loss": float(i), "reward": float(i)} for i in range(3)]


def test_after_the_next_has_begun_it_is_too_late(book):
    book.begin()
    first = book.end()
    book.begin()
    assert not first.is_open
    book.add("loss", 1.0)
    assert (first.close(), book.end().close()) == ({}, {"loss": 1.0})


def test_what_finds_the_row_written_stands_in_the_next(book):
    book.begin()
    assert book.end().close() == {}
    book.add("val_loss", 1.0)
    book.begin()
    assert book.end().close() == {"val_loss": 1.0}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (2, 2.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (np.array(1.5), 1.5),
        (np.array([[1.5]]), 1.5),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([3], dtype=torch.int64), 3.0),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (math.inf, math.inf),
    ],
)
def test_numbers_of_python_numpy_and_torch(book, value, kept, caplog):
    book.add("x", value)
    assert (book.end().close(), caplog.messages) == ({"x": kept}, [])


def test_nan_is_a_number_but_not_a_step(book, caplog):
    book.add("loss", math.nan)
    book.add("step", math.nan)
    assert list(book.end().close()) == ["loss"]
    assert caplog.messages == ["ampwatch: log(step=…) is not recorded: cannot convert float NaN to integer"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("a.jpg", "a number is wanted, got 'a.jpg'"),
        ("7", "a number is wanted, got '7'"),
        (None, "float() argument"),
        ([1, 2], "float() argument"),
        (1j, "float() argument"),
        (10**400, "int too large"),
        (np.zeros(2), "can only convert an array of size 1"),
        (torch.zeros(2), "a Tensor with 2 elements cannot be converted to Scalar"),
        (torch.zeros(1, device="meta"), "it lies on meta, and reading it would stop the device"),
    ],
)
def test_what_is_no_number_gives_one_warning_and_the_rest_is_kept(book, value, why, caplog):
    for _ in range(2):
        book.add("batch_id", value)
        book.add("loss", 1.0)
    assert book.end().close() == {"loss": 1.0}
    (message,) = caplog.messages
    assert message.startswith("ampwatch: log(batch_id=…) is not recorded: ")
    assert why in message


def test_names_that_a_batch_cannot_carry_are_changed(book):
    for i, name in enumerate(["val:loss", "x" * 80, ""]):
        book.add(name, i)
    assert book.end().close() == {"val_loss": 0.0, "x" * 64: 1.0, "_": 2.0}


def test_too_many_names_are_left_out(book, caplog):
    for i in range(1000):
        book.add(f"n{i}", i)
    assert len(book.end().close()) == 128
    assert len(caplog.messages) == 128
    assert caplog.messages[0] == "ampwatch: log(n128=…) is not recorded: more than 128 names"
