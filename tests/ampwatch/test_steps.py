"""Who hears of the steps of optimizers, and until when."""

from __future__ import annotations

import gc

import pytest
import torch

from ampwatch.guard import failures
from ampwatch.steps import listen, listen_no_more


class Ear:
    """Notes its name at each step of one optimizer, in a list that it shares; `fails` says that it raises instead."""

    def __init__(self, name, heard, optimizer, *, fails=False):
        self.name, self.heard, self.optimizer, self.fails = name, heard, optimizer, fails
        listen(self)

    def stepped(self, optimizer):
        if optimizer is self.optimizer:
            self.heard.append(1 / 0 if self.fails else self.name)


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)


def test_each_hears_of_a_step_in_its_turn_until_it_is_gone_or_wants_no_more(optimizer):
    heard = []
    first, second, third = (Ear(name, heard, optimizer) for name in ("first", "second", "third"))
    optimizer.step()
    del second
    gc.collect()
    listen_no_more(first)
    optimizer.step()
    assert heard == ["first", "second", "third", third.name]


def test_one_that_fails_is_counted_and_keeps_no_other_from_hearing(optimizer, monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    heard, before = [], failures["steps.told"]
    ears = [Ear("broken", heard, optimizer, fails=True), Ear("whole", heard, optimizer)]
    optimizer.step()
    assert (heard, failures["steps.told"] - before, len(ears)) == (["whole"], 1, 2)


def test_those_who_hear_of_a_step_may_change_in_it(optimizer):
    heard = []
    last = Ear("last", heard, optimizer)
    optimizer.register_step_post_hook(lambda *_: listen_no_more(last))
    ears = [Ear("first", heard, optimizer)]
    ears[0].stepped = lambda _: ears.append(Ear("new", heard, optimizer))
    optimizer.step()
    optimizer.step()
    assert heard == ["new"]
