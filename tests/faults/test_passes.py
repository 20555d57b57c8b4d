"""Backward passes that begin at a scaled loss, and those that do not though the scaler divides what they leave."""

import pytest
import torch
from loops import features, half, mlp, recorded, regression, told
from torch import nn
from torch.utils.checkpoint import checkpoint

BYPASSED = [
    ("scaler_bypassed", "error", 2, "")
]  # attempt 0 puts the hooks on, and one window may be a beginning


def trained(directory, backward, model=None, steps=12, to_none=True):
    """A loop whose backward passes are `backward(scaler, model, step)`."""
    model = model or mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with recorded(directory) as make:
        scaler = make(model=model)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=to_none)
            backward(scaler, model, step)
            scaler.step(optimizer)
            scaler.update()
    return told(directory)


def loss_of(model, step):
    with half():
        return regression(model, step)


def test_a_scaled_loss_that_nobody_uses(tmp_path):
    def backward(scaler, model, step):
        loss = loss_of(model, step)
        scaler.scale(loss)
        loss.backward()

    assert trained(tmp_path, backward) == BYPASSED


def penalty_of(model):
    return 1e-2 * sum(p.square().sum() for p in model.parameters())


def auxiliary(through_scaler):
    """A second loss beside the main one, before it."""

    def backward(scaler, model, step):
        penalty = penalty_of(model)
        (scaler.scale(penalty) if through_scaler else penalty).backward()
        scaler.scale(loss_of(model, step)).backward()

    return backward


@pytest.mark.parametrize(("through_scaler", "expected"), [(False, BYPASSED), (True, [])])
def test_a_second_loss_that_does_not_go_through_scale(tmp_path, through_scaler, expected):
    assert trained(tmp_path, auxiliary(through_scaler)) == expected


def in_order(*passes):
    """Backward passes of a window by their letters: S of a scaled loss, P of a scaled penalty, p of one as it is."""

    def backward(scaler, model, step):
        for letter in passes:
            loss = loss_of(model, step) if letter == "S" else penalty_of(model)
            (loss if letter == "p" else scaler.scale(loss)).backward()

    return backward


@pytest.mark.parametrize("passes", ["Sp", "SpS", "SSp", "SpSp"])
def test_one_behind_the_scaled_loss(tmp_path, passes):
    (finding,) = trained(tmp_path, in_order(*passes))
    assert finding == ("scaler_bypassed", "error", 4, "")


@pytest.mark.parametrize("passes", ["SP", "SPS", "SPSP"])
def test_one_behind_it_that_is_scaled_too(tmp_path, passes):
    assert trained(tmp_path, in_order(*passes)) == []


def test_one_behind_the_scaled_loss_that_comes_in_the_middle_of_a_run(tmp_path):
    def backward(scaler, model, step):
        in_order(*("Sp" if step >= 20 else "S"))(scaler, model, step)

    assert trained(tmp_path, backward, steps=40) == [("scaler_bypassed", "error", 23, "")]


@pytest.mark.parametrize(("passes", "attempt"), [("pS", 48), ("Sp", 64)])
def test_one_that_comes_every_sixteenth_time(tmp_path, passes, attempt):
    def backward(scaler, model, step):
        in_order(*("S" if step % 16 else passes))(scaler, model, step)

    assert trained(tmp_path, backward, steps=70) == [("scaler_bypassed", "error", attempt, "")]


def test_a_second_loss_that_is_tiny_and_scaled(tmp_path):
    def backward(scaler, model, step):
        scaler.scale(loss_of(model, step)).backward()
        scaler.scale(1e-6 * penalty_of(model)).backward()

    assert trained(tmp_path, backward) == []


def test_a_gradient_penalty_by_the_recipe(tmp_path):
    def backward(scaler, model, step):
        loss = loss_of(model, step)
        scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
        grads = [g / scaler.get_scale() for g in scaled]
        with half():
            total = loss + sum(g.square().sum() for g in grads).sqrt()
        scaler.scale(total).backward()

    assert trained(tmp_path, backward) == []


def test_a_second_loss_that_is_multiplied_by_the_scale_by_hand(tmp_path):
    def backward(scaler, model, step):
        scaler.scale(loss_of(model, step)).backward()
        (scaler.get_scale() * penalty_of(model)).backward()

    assert trained(tmp_path, backward) == []


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("to_none", [False, True])
def test_two_networks_of_which_one_loss_is_not_scaled(tmp_path, scaled, to_none):
    models = nn.ModuleList([mlp(), mlp()])
    with recorded(tmp_path) as make:
        scaler, optimizers = make(model=models), [torch.optim.Adam(m.parameters(), 1e-3) for m in models]
        for step in range(12):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=to_none)
            first, second = (loss_of(m, step) for m in models)
            (scaler.scale(first) if scaled else first).backward()
            scaler.scale(second).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert told(tmp_path) == ([] if scaled else BYPASSED)


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_cleared_before_the_scaled_pass_are_of_no_concern(tmp_path, to_none):
    def backward(scaler, model, step):
        loss_of(model, step).backward()  # to look at, as for a saliency map
        model.zero_grad(set_to_none=to_none)
        scaler.scale(loss_of(model, step)).backward()

    assert trained(tmp_path, backward) == []


def test_a_scaled_loss_may_be_divided_summed_kept_and_gone_back_through_twice(tmp_path):
    def backward(scaler, model, step):
        first, second = scaler.scale([loss_of(model, step), loss_of(model, step + 1)])
        ((first + second) / 4).backward(retain_graph=True)
        second.backward()

    assert trained(tmp_path, backward) == []


def test_losses_that_are_scaled_lazily_are_not_seen_and_not_judged(tmp_path):
    def backward(scaler, model, step):
        scaler.scale(loss_of(model, step))
        for loss in scaler.scale(loss_of(model, step + i) for i in range(2)):
            loss.backward()

    assert trained(tmp_path, backward) == []


class Checkpointed(nn.Module):
    """The first layer is computed once more in backward, by a pass within the pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = x.clone().requires_grad_()
        return self.last(checkpoint(self.first, x, use_reentrant=True).relu())


def test_a_pass_within_a_scaled_pass_is_a_part_of_it(tmp_path):
    def backward(scaler, model, step):
        scaler.scale(loss_of(model, step)).backward()

    assert trained(tmp_path, backward, Checkpointed()) == []


def test_such_passes_one_after_another(tmp_path):
    def backward(scaler, model, step):
        for part in range(4):
            scaler.scale(loss_of(model, 4 * step + part) / 4).backward()

    assert trained(tmp_path, backward, Checkpointed()) == []


def test_chunks_that_go_on_from_the_gradient_of_a_scaled_loss(tmp_path):
    """Contrastive training beyond memory: the loss of all embeddings first, then the encoder, chunk by chunk."""

    def backward(scaler, model, step):
        chunks = features(step).chunk(4)
        with torch.no_grad(), half():
            embedded = [model(chunk).float() for chunk in chunks]
        leaves = [each.requires_grad_() for each in embedded]
        scaler.scale((torch.cat(leaves) - features(step).sum(-1, keepdim=True)).square().mean()).backward()
        for chunk, leaf in zip(chunks, leaves, strict=True):
            with half():
                again = model(chunk).float()
            (again * leaf.grad).sum().backward()

    assert trained(tmp_path, backward) == []


def test_batches_in_float32_that_are_stepped_directly_in_between(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with recorded(tmp_path) as make:
        scaler = make(model=model)
        for step in range(24):
            if step % 2:
                regression(model, step).backward()
                optimizer.step()
                for p in model.parameters():
                    p.grad.data.zero_()  # which no counter tells
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
    assert told(tmp_path) == []
