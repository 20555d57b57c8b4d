"""Steps of optimizers that a scaler never steps: what is looked at, and for how long."""

import gc
import weakref

import torch
from torch.optim import SGD

from ampwatch.hooks import Announcements
from ampwatch.strangers import CLEARED_AFTER, MATRICES, Strangers


class Told:
    """A watcher that knows no optimizer and lists those it is told of."""

    def __init__(self, ours=(), parameters=()):
        self.ours, self.parameters, self.steps, self.seen = list(ours), list(parameters), 0, []

    def is_ours(self, optimizer):
        return any(optimizer is each for each in self.ours)

    def unscales(self, parameter):
        return any(parameter is each for each in self.parameters)

    def stepped_by_itself(self, optimizer):
        self.steps += 1

    def stepped_unscaled(self, optimizer, seen):
        self.seen.append(len(seen))


def announced(*, events=None):
    return Announcements(lambda type, **data: (events if events is not None else []).append((type, data)))


def step(strangers, weight, optimizer, *, scaled):
    loss = (weight * 2).sum()
    if scaled:
        loss = loss * 4
        strangers.scaled([loss])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped(scaled, steps=6, **watcher):
    weight = torch.ones(3, requires_grad=True)
    told, optimizer = Told(**watcher), SGD([weight], 0.1)
    strangers = Strangers(told, announced())
    strangers.scaled([])
    for i in range(steps):
        step(strangers, weight, optimizer, scaled=scaled(i))
    left = strangers.suspects
    strangers.close()
    return told.steps, left


def test_every_step_but_the_first_is_told_where_the_loss_is_scaled():
    assert stepped(lambda i: True) == (5, 1)


def test_one_whose_losses_are_not_scaled_is_cleared():
    assert stepped(lambda i: False) == (0, 0)
    assert stepped(lambda i: i > CLEARED_AFTER) == (0, 0)
    assert stepped(lambda i: i == CLEARED_AFTER) == (1, 1)


def test_a_few_of_its_gradients_are_handed_on_until_it_is_cleared():
    """The first and those of matrices, as the backward passes of other losses left them."""
    weights = [torch.ones(*shape, requires_grad=True) for shape in [(3,), (3,), *[(2, 2)] * 6]]
    strangers, optimizer = Strangers(told := Told(), announced()), SGD(weights, 0.1)
    strangers.scaled([])
    for _ in range(CLEARED_AFTER + 3):
        sum(w.sum() for w in weights).backward()
        optimizer.step()
    assert told.seen == [1 + MATRICES] * CLEARED_AFTER
    strangers.close()


def test_one_that_is_ours_or_shares_a_parameter_is_never_looked_at():
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], 0.1)
    strangers = Strangers(told := Told(ours=[optimizer]), announced())
    for _ in range(4):
        step(strangers, weight, optimizer, scaled=True)
    told.ours, told.parameters = [], [weight]
    for _ in range(4):
        step(strangers, weight, optimizer, scaled=True)
    assert (told.steps, strangers.suspects) == (0, 0)
    strangers.close()


def test_one_that_becomes_ours_is_let_go():
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], 0.1)
    strangers = Strangers(told := Told(), announced())
    for _ in range(2):
        step(strangers, weight, optimizer, scaled=True)
    told.ours = [optimizer]
    assert strangers.suspects == 1
    step(strangers, weight, optimizer, scaled=True)
    assert (told.steps, strangers.suspects) == (1, 0)
    strangers.close()


def test_it_ends_with_close_and_keeps_nobody_alive():
    strangers = Strangers(told := Told(), announced())
    strangers.scaled([])
    gone = weakref.ref(told)
    del told
    gc.collect()
    assert gone() is None
    weight = torch.ones(3, requires_grad=True)
    step(strangers, weight, SGD([weight], 0.1), scaled=False)
    assert strangers.suspects == 0


def test_a_watch_may_end_while_an_optimizer_steps():
    strangers = [Strangers(told, announced()) for told in [Told()]]
    strangers[0].scaled([])
    weight = torch.ones(3, requires_grad=True)
    optimizer = SGD([weight], 0.1)
    optimizer.register_step_post_hook(lambda *_: strangers.pop().close())
    weight.sum().backward()
    optimizer.step()
    assert strangers == []


def test_a_hook_goes_with_its_optimizer():
    gc.collect()  # scalers of other tests, to which this optimizer is a stranger too
    weight = torch.ones(3, requires_grad=True)
    strangers = Strangers(told := Told(), announced())
    optimizer = SGD([weight], 0.1)
    step(strangers, weight, optimizer, scaled=True)
    assert (told.steps, len(weight._post_accumulate_grad_hooks)) == (0, 1)
    del optimizer
    gc.collect()
    assert (strangers.suspects, len(weight._post_accumulate_grad_hooks)) == (0, 0)


def test_hooks_on_a_suspect_are_announced_as_they_come_and_go():
    events, weight = [], torch.ones(3, requires_grad=True)
    optimizer, announcements = SGD([weight], 0.1), announced(events=events)
    strangers = Strangers(told := Told(), announcements)
    strangers.scaled([])
    for _ in range(CLEARED_AFTER + 1):
        step(strangers, weight, optimizer, scaled=False)
        announcements.tell()
    strangers.close()
    assert told.steps == 0
    assert events == [
        ("observers", {"observers": ["strangers"], "hooks": 1, "why": "stepped_outside"}),
        ("observers", {"observers": ["strangers"], "hooks": 0, "why": "done"}),
    ]
