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


FULL, LEAST = -math.inf, -65504.0


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([0.0, FULL], True),
        ([0.0, LEAST, FULL], True),  # two masks of float16's minimum, added up
        ([0.0, -0.5, FULL], True),  # a bias that falls with distance
        ([0.0, LEAST], True),
        ([1.0, 0.0, FULL], False),  # a feature: the logarithm of 0
        ([-1.0, FULL], False),
        ([0.0, FULL, math.inf], False),
        ([0.0, FULL, math.nan], False),
    ],
)
def test_a_mask_is_given_where_the_maximum_is_zero(values, finite):
    seen = search(nn.Identity(), torch.tensor(values))
    assert (seen["inputs_finite"], seen["outputs_finite"]) == (finite, finite)


def test_minus_infinity_in_what_needs_a_gradient_is_no_mask():
    seen = search(nn.Identity(), torch.tensor([0.0, FULL], requires_grad=True))
    assert (seen["inputs_finite"], seen["outputs_finite"]) == (False, False)


@pytest.mark.parametrize("empty", [torch.empty(0, 3), torch.tensor([0j, 1j])])
def test_what_has_no_maximum_is_no_mask(empty):
    assert search(nn.Identity(), empty)["inputs_finite"] is True


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
    """One number for the parameters, ten for each of the two tensors of a call."""
    return 1 + 10 * 2 * calls


def passes(model, *inputs):
    """What is said of several passes, as an accumulation makes them, and how many numbers were kept of them."""
    observer = ForwardSearch(model)
    observer.arm()
    for x in inputs:
        forward(model, x)
        observer.pass_ended()
    seen = observer.collect()
    return seen.decode(seen.values.numpy()), seen.values.numel()


FINITE, LARGE, LARGER = torch.ones(4, 16), torch.full((4, 16), 3e5), torch.full((4, 16), 6e5)


@pytest.mark.parametrize("inputs", [[LARGE], [FINITE, LARGE], [FINITE] * 40 + [LARGE, FINITE, LARGER]])
def test_of_several_passes_the_first_that_breaks_is_told(inputs):
    seen, kept = passes(mlp(), *inputs)
    assert (seen["origin"]["module"], seen["origin"]["input_max_abs"]) == ("0", 3e5)
    assert kept == search_size(calls=4)  # of one pass, however many there are


def test_of_passes_that_are_all_finite_the_last_is_told():
    seen, kept = passes(mlp(), FINITE, FINITE)
    assert (seen["origin"], seen["outputs_finite"], kept) == (None, True, search_size(calls=4))


class Chosen(nn.ModuleList):
    def forward(self, i, x):
        return self[i](x)


def test_passes_of_different_calls_are_kept_apart_up_to_eight():
    model = Chosen(nn.Linear(16, 16) for _ in range(10))
    observer = ForwardSearch(model)
    observer.arm()
    for i in range(10):
        forward(model, i, LARGE if i == 5 else FINITE)
        observer.pass_ended()
    assert read(observer)["origin"]["module"] == "5"
    assert observer.collect().values.numel() == 1 + 8 * 10 * 4


def test_the_memory_of_a_pass_is_bounded():
    model = nn.ModuleList([nn.Identity()])
    observer = ForwardSearch(model)
    observer.arm()
    for _ in range(5000):
        model[0](torch.ones(1))
    assert observer.collect().values.numel() == 1 + 10 * 8192


@pytest.mark.parametrize("before", [True, False])
def test_an_evaluation_does_not_take_the_search(before):
    model = mlp()
    observer = ForwardSearch(model)
    observer.arm()
    for is_evaluation in (before, not before):
        with torch.set_grad_enabled(not is_evaluation):
            model.train(not is_evaluation)
            forward(model, FINITE if is_evaluation else torch.full((4, 16), math.nan))
    seen = read(observer)
    assert (seen["inputs_finite"], seen["outputs_finite"], seen["origin"]) == (False, False, None)


def test_an_evaluation_alone_is_nothing_seen():
    observer = ForwardSearch(mlp())
    observer.arm()
    with torch.no_grad():
        forward(observer._model, LARGE)
    assert observer.collect() is None


def test_started_again_it_tells_of_what_comes_then():
    model = mlp()
    observer = ForwardSearch(model)
    observer.arm()
    forward(model, LARGE)
    observer.restart()
    forward(model, FINITE)
    assert read(observer)["outputs_finite"] is True


def test_a_module_that_raises_takes_what_it_called_with_it():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad = nn.Sequential(nn.Linear(16, 16), nn.Linear(3, 3))

        def forward(self, x):
            with pytest.raises(RuntimeError):
                self.bad(x * 1e30)
            return x

    seen = search(Tries(), FINITE)
    assert (seen["origin"], seen["path"], seen["outputs_finite"]) == (None, [], True)


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


def cells(*gains):
    model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in gains)
    for cell, gain in zip(model, gains, strict=True):
        nn.init.constant_(cell.weight, gain)
    return model


def search_cells(model, x, between=lambda x: x):
    observer = ForwardSearch(model)
    observer.arm()
    for cell in model:
        x = between(forward(cell, x))
    return read(observer)


def test_parts_that_are_called_in_a_loop_are_not_blamed_on_the_inputs():
    seen = search_cells(cells(1.0, 1e4, 1.0), torch.ones(2, 4))  # 4, 160,000
    assert (seen["origin"]["module"], [each["module"] for each in seen["path"]]) == ("1", ["1", "2"])
    assert (seen["inputs_finite"], seen["outputs_finite"]) == (None, False)


def test_what_the_loop_does_between_its_parts_is_not_blamed_on_the_inputs():
    seen = search_cells(cells(1.0, 1.0), torch.ones(2, 4), between=lambda x: x * 1e5)
    assert (seen["origin"], seen["inputs_finite"], seen["outputs_finite"]) == (None, None, False)


def test_what_the_first_part_is_given_are_the_inputs():
    seen = search_cells(cells(1.0, 1.0), torch.full((2, 4), math.nan))
    assert (seen["origin"], seen["inputs_finite"], seen["outputs_finite"]) == (None, False, False)


def test_what_is_made_without_gradients_is_not_blamed_on_the_inputs():
    model = nn.ModuleDict({"generator": nn.Linear(4, 4), "critic": nn.Linear(4, 4)})
    observer = ForwardSearch(model)
    observer.arm()
    with torch.no_grad():
        fake = forward(model["generator"], torch.ones(2, 4)) * 1e6
    forward(model["critic"], fake)
    seen = read(observer)
    assert (seen["origin"], seen["inputs_finite"], seen["outputs_finite"]) == (None, None, False)


def test_an_observation_does_not_change_with_what_comes_after():
    model = mlp()
    observer = ForwardSearch(model)
    observer.arm()
    model[0](torch.ones(4, 16))
    seen = observer.collect()
    model(torch.full((4, 16), math.inf))
    assert seen.decode(seen.values.numpy())["outputs_finite"] is True
