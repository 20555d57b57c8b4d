"""Lockstep is only shown where the pass that was named has run: a kernel that fails is not passed over."""

from __future__ import annotations

import pytest
import torch

from ampwatch import watching
from ampwatch.guard import failures
from ampwatch.stats.choose import Statistics, choose

from . import twin
from .twin import assert_lockstep, training


def test_a_kernel_that_fails_ends_the_comparison(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    named = Statistics(twin.statistics[0], choose("reference").compute, broken)
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    monkeypatch.setattr(watching, "choose", lambda *_: named)
    with pytest.raises(AssertionError, match=rf"stats\.{twin.statistics[0]}"):
        assert_lockstep(training(torch.optim.SGD))
    failures.clear()


def test_another_pass_than_the_named_ends_the_comparison(monkeypatch):
    twin.statistics[:] = ["cpu"]
    monkeypatch.setattr(watching, "choose", lambda *_: choose("reference"))
    with pytest.raises(AssertionError, match="reference"):
        assert_lockstep(training(torch.optim.SGD))
