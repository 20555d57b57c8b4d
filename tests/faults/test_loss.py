"""Losses that break in float16 although the model does not, and masks that leave nothing to look at."""

import pytest
import torch
from loops import above_info, features, mlp, recorded, train, worse_than_info
from torch import Tensor, nn
from torch.nn import functional as F


def by_loss(directory, loss_of, gain, steps=20):
    """A model whose outputs grow by a factor at step 9, far within float16."""
    model = mlp(out=4)

    def loss_at(step):
        return loss_of(model(features(step)) * (gain if step >= 9 else 1.0), step)

    with recorded(directory) as scaler:
        train(model, scaler(model=model, init_scale=2.0**10), loss_at, steps=steps)


def log_of_softmax(logits: Tensor, step: int) -> Tensor:
    return -logits.softmax(-1).log().mean().float()


def focal(logits: Tensor, step: int) -> Tensor:
    p = logits.sigmoid().clamp(1e-4, 1 - 1e-4)
    return -((1 - p).log() * p.square()).float().mean()


def summed(logits: Tensor, step: int) -> Tensor:
    return (logits - 1).square().sum().float() / 128


class Criterion(nn.Module):
    """A model that returns its loss, as those of some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(out=4)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return log_of_softmax(self.body(x) * self.gain, 0)


@pytest.mark.parametrize(("loss", "gain"), [(log_of_softmax, 200.0), (focal, 200.0), (summed, 300.0)])
def test_a_loss_evaluated_in_float16_is_named(tmp_path, loss, gain):
    by_loss(tmp_path, loss, gain)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step) == ("loss_in_fp16", "fatal", 9)


def test_it_is_said_within_six_attempts(tmp_path):
    by_loss(tmp_path, log_of_softmax, 200.0, steps=13)
    assert above_info(tmp_path) == [("loss_in_fp16", "fatal")]


def test_the_operations_are_listed_in_the_order_they_run(tmp_path):
    by_loss(tmp_path, log_of_softmax, 200.0)
    (finding,) = worse_than_info(tmp_path)
    assert finding.evidence[1].text == "Computed in float16 after them: Mul, Softmax, Log, Mean."


def test_the_same_loss_in_float32_is_silent(tmp_path):
    by_loss(
        tmp_path, lambda logits, step: F.cross_entropy(logits.float(), features(step).argmax(-1) % 4), 200.0
    )
    assert above_info(tmp_path) == []


def test_a_model_that_returns_its_loss_is_no_overflow(tmp_path):
    model = Criterion()

    def loss_at(step):
        model.gain = 200.0 if step >= 9 else 1.0
        return model(features(step))

    with recorded(tmp_path) as scaler:
        train(model, scaler(model=model, init_scale=2.0**10), loss_at, steps=20)
    assert above_info(tmp_path) == [("loss_in_fp16", "fatal")]


def test_targets_that_are_nan_are_not_blamed_on_float16(tmp_path):
    def loss_of(outputs, step):
        target = torch.full((32, 4), torch.nan if step >= 9 else 0.5)
        return F.mse_loss(outputs.float(), target)

    by_loss(tmp_path, loss_of, 1.0)
    assert above_info(tmp_path) == [("nonfinite_forward", "fatal")]


class Masked(nn.Module):
    """One layer of attention over tokens of which 0 is padding, with a mask as people write it."""

    def __init__(self, constant: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 16)
        self.constant = constant

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        hidden = (tokens == 0).unsqueeze(1) * self.constant
        scores = q @ k.mT / 4 + hidden.to(q.dtype)
        return self.head(scores.softmax(-1) @ v)


def padded(directory, constant, all_padding_from, steps=24):
    model = Masked(constant)

    def loss_at(step):
        tokens = torch.randint(1, 16, (4, 6), generator=torch.Generator().manual_seed(step))
        tokens[0, 4:] = 0
        if step >= all_padding_from:
            tokens[1] = 0
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss_at, steps=steps)


@pytest.mark.parametrize("constant", [-1e9, -1e30])
def test_a_mask_beyond_float16_over_a_whole_row_is_named(tmp_path, constant):
    padded(tmp_path, constant, all_padding_from=10)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step, finding.module) == (
        "mask_constant",
        "fatal",
        10,
        "",
    )
    assert finding.evidence[0].text.startswith("6 of 24 rows of scores")


def test_it_is_named_from_the_first_batch_on(tmp_path):
    padded(tmp_path, -1e9, all_padding_from=0, steps=6)
    assert above_info(tmp_path) == [("mask_constant", "fatal")]


def silent_padding(directory, constant, steps=24):
    """As `padded`, where padding counts for nothing in the loss, which so stays finite."""
    model = Masked(constant)

    def loss_at(step):
        tokens = torch.randint(1, 16, (4, 6), generator=torch.Generator().manual_seed(step))
        tokens[1] = 0
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten(), ignore_index=0)

    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss_at, steps=steps)


def test_a_mask_is_named_though_the_loss_leaves_its_rows_out(tmp_path):
    silent_padding(tmp_path, -1e9, steps=7)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step) == ("mask_constant", "fatal", 0)
    assert finding.evidence[0].text.startswith("6 of 24 rows of scores")


def test_padding_that_is_left_out_and_masked_within_float16_is_silent(tmp_path):
    silent_padding(tmp_path, -1e4)
    assert above_info(tmp_path) == []


class Biased(Masked):
    """The same with a mask from outside."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        return self.head((q @ k.mT / 4 + mask.to(q.dtype)).softmax(-1) @ v)


def two_masks(directory, least):
    """A causal and a padding mask are added up outside of the model; from step 9 on padding stands at the left."""
    model = Biased(least)
    causal = torch.full((6, 6), least, dtype=torch.float16).triu(1)

    def loss_at(step):
        tokens = torch.randint(1, 16, (4, 6), generator=torch.Generator().manual_seed(step))
        tokens[:2, :2] = 0 if step >= 9 else 1
        empty = (tokens == 0).half() * least
        mask = causal + empty[:, None] + empty[:, :, None]
        return F.cross_entropy(model(tokens, mask).flatten(0, 1).float(), tokens.flatten())

    with recorded(directory) as scaler:
        train(model, scaler(model=model), loss_at, steps=24)


def test_masks_of_the_minimum_that_add_up_to_minus_infinity_are_named(tmp_path):
    two_masks(tmp_path, torch.finfo(torch.float16).min)
    (finding,) = worse_than_info(tmp_path)
    assert (finding.kind, finding.severity, finding.first_step) == ("mask_constant", "fatal", 9)


def test_masks_that_float16_holds_when_added_up_are_silent(tmp_path):
    two_masks(tmp_path, -1e4)
    assert above_info(tmp_path) == []


@pytest.mark.parametrize(("constant", "start"), [(-1e4, 10), (-1e9, 1000)])
def test_a_mask_within_float16_or_of_some_keys_is_silent(tmp_path, constant, start):
    padded(tmp_path, constant, all_padding_from=start)
    assert above_info(tmp_path) == []
