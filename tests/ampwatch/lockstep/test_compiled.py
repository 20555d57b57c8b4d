"""A train step that is compiled as a whole: as many graphs as with torch's scaler, and the same of everything else."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from .twin import assert_lockstep, batches, bits, loss_of, small_model

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own compiler


def step_of(model, optimizer, scaler, clips):
    def step(batch):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize(("clips", "warmed"), list(product([False, True], repeat=2)))
def test_a_step_has_as_many_graphs(clips, warmed):
    def loop(make):
        torch._dynamo.reset()
        graphs, model = [], small_model()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), make(model, growth_interval=2)
        if warmed:
            scaler.scale(torch.ones(()))
        step = torch.compile(
            step_of(model, optimizer, scaler, clips),
            backend=lambda module, _: graphs.append(module) or module.forward,
        )
        for batch in batches(4):
            step(batch)
            yield bits(list(model.parameters())), scaler.state_dict()
        yield len(graphs)

    assert assert_lockstep(loop)[-1] == 2 + clips


@pytest.mark.parametrize("part", [lambda scaler, loss: scaler.scale(loss), lambda scaler, _: scaler.update()])
def test_what_cannot_be_one_graph_is_refused_for_torchs_method(part):
    """torch never traces its scaler. Ours calls it, and the words say so: only the name and the kind are the same."""

    def loop(make):
        torch._dynamo.reset()
        scaler = make()
        scaler.scale(torch.ones(()))
        whole = torch.compile(lambda loss: part(scaler, loss), backend="eager", fullgraph=True)
        try:
            whole(torch.ones(()))
        except torch._dynamo.exc.Unsupported as error:
            yield "should not be traced" in str(error), "`GradScaler." in str(error)

    assert assert_lockstep(loop) == [(True, True)]
