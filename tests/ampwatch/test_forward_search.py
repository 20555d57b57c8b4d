"""The forward search on real models under float16 autocast on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampwatch.observers import ForwardSearch

from .watched import IDS, Attention, Transformer, backward, forward, mlp, read

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def strict(monkeypatch):
    monkeypatch.setenv("AMPWATCH_STRICT", "1")
    torch.manual_seed(0)


def search(model, *inputs, **named):
    """What the forward search says of one pass."""
    observer = ForwardSearch(model)
    observer.arm()
    forward(model, *inputs, **named)
    observer.disarm()
    return read(observer)


def test_a_healthy_pass_has_no_origin():
    assert search(Transformer(1.0, 1.0), IDS) == {
        "origin": None,
        "path": [],
        "inputs_finite": True,
        "outputs_finite": True,
        "parameters_finite": True,
    }


def test_scores_that_overflow_name_the_attention_that_holds_them():
    model = Transformer(1.0, 1e4, 1.0)
    seen = search(model, IDS)
    origin = seen["origin"]
    assert (origin["module"], origin["module_type"], origin["input_n_nonfinite"]) == (
        "blocks.1",
        "Attention",
        0,
    )
    assert 0 < origin["children_max_abs"] < 100
    assert origin["output_n_nan"] == 2 * 8 * 16
    assert [each["module"] for each in seen["path"][:2]] == ["blocks.1.out", "blocks.1"]
    assert (seen["inputs_finite"], seen["outputs_finite"], seen["parameters_finite"]) == (True, False, True)


def test_an_activation_beyond_float16_names_its_layer():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    nn.init.constant_(model[0].weight, 100.0)
    nn.init.zeros_(model[0].bias)
    seen = search(model, torch.full((3, 4), 200.0))  # 4 * 100 * 200 = 80,000
    assert seen["origin"] == {
        "module": "0",
        "module_type": "Linear",
        "input_max_abs": 200.0,
        "input_n_nonfinite": 0,
        "output_n_inf": 24,
        "output_n_nan": 0,
        "output_max_abs": 0.0,
        "children_max_abs": None,
    }
    assert [each["module"] for each in seen["path"]] == ["0", "1", "2", ""]


def test_an_embedding_with_infinite_weights():
    model = Transformer(1.0)
    model.embedding.weight.data[3] = math.inf
    seen = search(model, IDS)
    assert (seen["origin"]["module"], seen["origin"]["input_max_abs"]) == ("embedding", None)
    assert (seen["inputs_finite"], seen["parameters_finite"]) == (True, False)


def test_of_shared_weights_the_first_offending_call_counts():
    shared = nn.Linear(4, 4, bias=False)
    nn.init.constant_(shared.weight, 20.0)
    seen = search(nn.Sequential(shared, shared, shared, shared), torch.ones(2, 4))  # 80, 6400, 512,000
    assert (seen["origin"]["module"], seen["origin"]["input_max_abs"]) == ("0", 6400.0)


def test_batch_norm_on_an_overflow_is_not_blamed():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.constant_(model[0].weight, 1e5)  # infinite as float16, finite as a parameter
    seen = search(model, torch.ones(3, 4))
    assert (seen["origin"]["module"], seen["parameters_finite"]) == ("0", True)


def test_inputs_that_are_not_finite_are_nobodys_fault():
    seen = search(mlp(), torch.tensor([[math.nan] * 16, [1.0] * 16]))
    assert (seen["origin"], seen["inputs_finite"], seen["outputs_finite"]) == (None, False, False)


def test_a_given_mask_does_not_hide_who_overflowed():
    mask = torch.full((8, 8), -math.inf).triu(1)
    seen = search(Attention(1e4), torch.randn(2, 8, 16), mask=mask)
    assert (seen["origin"]["module_type"], seen["inputs_finite"]) == ("Attention", True)


def test_scores_masked_by_a_module_of_their_own_are_no_origin():
    class Masked(nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), -math.inf)

    seen = search(nn.Sequential(nn.Linear(8, 8), Masked(), nn.Softmax(-1)), torch.randn(8, 8))
    assert (seen["origin"], seen["outputs_finite"]) == (None, True)
    assert [each["module"] for each in seen["path"]] == ["1"]


def test_what_checkpointing_runs_again_does_not_count():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    observer = ForwardSearch(model)
    observer.arm()
    backward(model, torch.ones(4, 16))
    assert observer.collect().values.numel() == search_size(calls=5)


def search_size(calls):
    """One number for the parameters, nine for each of the two tensors of a call."""
    return 1 + 9 * 2 * calls


def test_only_the_first_pass_counts_until_it_is_armed_again():
    model = mlp()
    observer = ForwardSearch(model)
    observer.arm()
    for x in (torch.ones(4, 16), torch.full((4, 16), 1e6)):
        forward(model, x)
    assert read(observer)["outputs_finite"] is True
    observer.disarm()
    observer.arm()
    forward(model, torch.full((4, 16), 1e6))
    assert read(observer)["outputs_finite"] is False


def test_a_module_that_raises_and_is_caught_leaves_the_nesting_intact():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = nn.Linear(3, 3), nn.Linear(16, 16)

        def forward(self, x):
            with pytest.raises(RuntimeError):
                self.bad(x)
            return self.good(x) * 1e30

    seen = search(Tries(), torch.ones(4, 16))
    assert (seen["origin"]["module"], seen["outputs_finite"]) == ("", False)


def test_parts_of_a_model_that_is_never_called_as_a_whole():
    parts = nn.ModuleDict({"generator": mlp(), "critic": mlp()})
    observer = ForwardSearch(parts)
    observer.arm()
    forward(parts["critic"], forward(parts["generator"], torch.ones(4, 16)) * 1e30)
    seen = read(observer)
    assert (seen["inputs_finite"], seen["outputs_finite"]) == (False, False)


def test_an_observation_does_not_change_with_what_comes_after():
    model = mlp()
    observer = ForwardSearch(model)
    observer.arm()
    model[0](torch.ones(4, 16))
    seen = observer.collect()
    model(torch.full((4, 16), math.inf))
    assert seen.decode(seen.values.numpy())["outputs_finite"] is True
