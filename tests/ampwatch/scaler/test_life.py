"""Scalers that are watched in place, copied, forked and let go."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

import ampwatch
from ampwatch.errors import SettingsError
from ampwatch.settings import Settings

from ..recorded import MemoryRecorder
from ..recorded import scaler as make
from .loops import Weighted, attempt, sgd


def test_watching_in_place_keeps_class_state_and_patches(recorder):
    class Theirs(torch.amp.GradScaler):
        def get_scale(self):
            return -super().get_scale()

    scaler = Theirs("cpu", init_scale=4.0)
    scaler.note = "patched onto the instance"
    assert ampwatch.watch(scaler, recorder=recorder) is scaler
    assert isinstance(scaler, Theirs)
    model = Weighted()
    attempt(scaler, model, sgd(model))
    assert (scaler.get_scale(), scaler.note, recorder.column("scale")) == (
        -4.0,
        "patched onto the instance",
        [4.0],
    )
    assert recorder.data("scaler")[0]["class"] == "Theirs"


def test_where_torchs_name_is_given_to_ours(recorder, monkeypatch):
    """As by a script that has the code of others train with ampwatch."""
    before = torch.amp.GradScaler("cpu", init_scale=4.0)
    monkeypatch.setattr(torch.amp, "GradScaler", ampwatch.GradScaler)
    model = Weighted()
    for scaler in (
        torch.amp.GradScaler("cpu", 8.0, recorder=recorder),
        ampwatch.watch(before, recorder=recorder),
    ):
        attempt(scaler, model, sgd(model))
    assert recorder.column("scale") == [8.0, 4.0]
    assert not isinstance(copy.copy(before), ampwatch.GradScaler)


def test_watching_twice_is_watching_once(recorder):
    scaler = make(recorder)
    assert ampwatch.watch(ampwatch.watch(scaler)) is scaler
    assert len(recorder.sources) == 1


def test_a_deep_copy_records_as_a_scaler_of_its_own(recorder):
    model = Weighted()
    original = make(recorder)
    attempt(original, model, sgd(model))
    other = Weighted()
    attempt(copy.deepcopy(original), other, sgd(other))
    assert (recorder.column("stream"), len(recorder.data("scaler"))) == ([0, 1], 2)


def test_an_unknown_torch_runs_untouched(recorder):
    class Changed(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, False)

    scaler = Changed("cpu")
    with pytest.warns(
        RuntimeWarning, match="Changed runs without ampwatch, which does not know _unscale_grads_"
    ):
        ampwatch.watch(scaler, recorder=recorder)
    assert type(scaler) is Changed
    assert [e.data["where"] for e in recorder.events("fault")] == ["scaler.open"]


class Handmade(type):
    """A metaclass of classes that are written by hand."""

    def __new__(cls, name, bases, namespace):
        if "__qualname__" not in namespace:
            raise TypeError("not written by hand")
        return super().__new__(cls, name, bases, namespace)


def test_a_class_that_cannot_be_mixed_trains_as_it_is(recorder, monkeypatch):
    class Theirs(torch.amp.GradScaler, metaclass=Handmade):
        """Whatever fails, it is the training's own scaler."""

    monkeypatch.setenv("AMPWATCH_STRICT", "0")
    scaler = Theirs("cpu", init_scale=4.0)
    assert ampwatch.watch(scaler, recorder=recorder) is scaler
    assert type(scaler) is Theirs
    assert [e.data["where"] for e in recorder.events("fault")] == ["scaler.open"]
    model = Weighted()
    attempt(scaler, model, sgd(model))
    assert recorder.column("scale") == []


def test_a_class_that_is_told_of_its_subclasses_is_not_told_of_ours(recorder):
    told = []

    class Theirs(torch.amp.GradScaler):
        def __init_subclass__(cls):
            told.append(cls)

    model = Weighted()
    attempt(ampwatch.watch(Theirs("cpu", init_scale=4.0), recorder=recorder), model, sgd(model))
    assert (told, recorder.column("scale")) == ([], [4.0])


@pytest.mark.parametrize("in_place", [False, True])
def test_methods_of_a_user_that_hand_on_what_they_are_given(in_place, recorder):
    first = torch.amp.GradScaler if in_place else ampwatch.GradScaler

    class Theirs(first):
        calls = ()

        def unscale_(self, *args, **kwargs):
            self.calls += ("unscale_",)
            super().unscale_(*args, **kwargs)

        def step(self, *args, **kwargs):
            self.calls += ("step",)
            return super().step(*args, **kwargs)

        def _unscale_grads_(self, optimizer, *args, **kwargs):
            self.calls += ("_unscale_grads_",)
            return super()._unscale_grads_(optimizer, *args, **kwargs)

        def update(self, *args, **kwargs):
            self.calls += ("update",)
            super().update(*args, **kwargs)

    given = {} if in_place else {"recorder": recorder}
    scaler = Theirs("cpu", init_scale=4.0, **given)
    model = Weighted()
    attempt(ampwatch.watch(scaler, recorder=recorder), model, sgd(model))
    assert scaler.calls == ("step", "unscale_", "_unscale_grads_", "update")
    assert recorder.column("scale") == [4.0]


def test_nothing_is_recorded_after_the_end(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder)
    attempt(scaler, model, optimizer)
    recorder.finished = True
    attempt(scaler, model, optimizer)
    assert recorder.column("attempt") == [0]


def test_a_forked_child_introduces_everything_anew(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    attempt(scaler, model, optimizer)
    recorder.producer = "1" * 32  # as after a fork
    attempt(scaler, model, optimizer)
    assert [len(recorder.data(type)) for type in ("scaler", "optimizers", "tensors")] == [2, 2, 2]
    assert recorder.column("stream") == [0, 0]


def test_inside_a_compiled_function_the_scaler_is_torchs(recorder):
    scaler = make(recorder, init_scale=4.0)
    compiled = torch.compile(lambda loss: scaler.scale(loss) * 2, backend="eager")
    assert compiled(torch.tensor(3.0)).item() == 24.0


def test_hooks_go_with_the_scaler(recorder):
    gc.collect()  # scalers of the tests before, to which this optimizer would be a stranger
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    attempt(scaler, model, optimizer)
    assert len(model.w._post_accumulate_grad_hooks) == 1
    del scaler
    gc.collect()
    assert len(model.w._post_accumulate_grad_hooks) == 0
    assert recorder.column("attempt") == [0]


def test_a_scaler_may_go_while_its_optimizer_steps(recorder):
    """The collector comes when it likes: torch must not meet hooks that come off as it goes through them."""
    model = Weighted()
    optimizer, scalers = sgd(model), [make(recorder, model=model)]
    attempt(scalers[0], model, optimizer)
    for each in (scalers.clear, gc.collect, list):
        optimizer.register_step_post_hook(lambda *_, each=each: each())
    optimizer.step()
    assert recorder.column("attempt") == [0]


def test_models_and_optimizers_that_are_watched_can_be_copied(recorder):
    model = Weighted()
    optimizer, scaler = sgd(model), make(recorder, model=model)
    attempt(scaler, model, optimizer)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(duplicate.w, model.w)
    assert copy.deepcopy(optimizer).state_dict() == optimizer.state_dict()


def test_a_setting_that_cannot_be_used_is_refused_at_construction():
    with pytest.raises(SettingsError, match="statistics"):
        ampwatch.GradScaler("cpu", settings=Settings(statistics="guessed"))


def test_what_is_watched_already_is_told_of_another_listener(recorder):
    scaler, heard = make(recorder), print
    assert ampwatch.watch(scaler, on_finding=heard) is scaler
    assert (recorder.listeners, len(recorder.sources)) == ([heard], 1)


@pytest.mark.parametrize("in_place", [True, False])
def test_after_the_end_it_can_be_watched_anew(recorder, in_place):
    model, second = Weighted(), MemoryRecorder()
    optimizer = sgd(model)
    scaler = ampwatch.watch(torch.amp.GradScaler("cpu"), recorder=recorder) if in_place else make(recorder)
    attempt(scaler, model, optimizer)
    recorder.finished = True
    kind = type(scaler)
    assert type(ampwatch.watch(scaler, model=model, recorder=second)) is kind
    attempt(scaler, model, optimizer)
    assert (recorder.column("attempt"), second.column("attempt")) == ([0], [0])
    assert second.data("tensors")[0]["tensors"][0]["name"] == "w"


def test_a_deep_copy_that_is_watched_records_where_its_original_does(recorder):
    model = Weighted()
    attempt(ampwatch.watch(copy.deepcopy(make(recorder)), model=model), model, sgd(model))
    assert recorder.column("attempt") == [0]
    assert recorder.data("tensors")[0]["tensors"][0]["name"] == "w"
