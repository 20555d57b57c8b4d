"""The order of calls: every fault of docs/format.md, and the loops that look odd and are healthy."""

from __future__ import annotations

import pytest

from ampwatch.protocol import LONGEST_ORDER, CallFault, Protocol


def play(*calls, protocol=None):
    """Faults of a session such as "scale", "unscale_:0", "step:0", "update"; a trailing "!" means torch raised."""
    protocol = protocol or Protocol()
    found = []
    for text in calls:
        name, _, index = text.rstrip("!").partition(":")
        if name == "scale":
            protocol.scale()
        elif name == "backward":
            protocol.accumulated(int(index))
        elif name == "outside":
            found += protocol.step_outside(int(index))
        else:
            found += protocol.close(announce(protocol, name, index), raised=text.endswith("!"))
    return [(f.fault, f.optimizer, f.raised) for f in found]


def announce(protocol, name, index):
    if name == "unscale_":
        return protocol.unscale(int(index))
    if name in ("step", "closure"):
        return protocol.step(int(index), closure=name == "closure")
    if name == "lbfgs":
        return protocol.step(int(index), closure=False, wanted=True)
    return protocol.update(manual=name == "set")


PLAIN = ("scale", "backward:0", "step:0", "update")


@pytest.mark.parametrize(
    "calls",
    [
        PLAIN * 2,
        ("scale", "backward:0", "unscale_:0", "step:0", "update") * 2,
        ("scale", "backward:0", "scale", "backward:0", "step:0", "update") * 2,
        ("scale", "scale", "backward:0", "unscale_:0", "step:0", "update"),
        ("scale", "backward:0", "step:0", "update", "scale", "backward:0", "backward:1", "step:1", "update")
        * 2,
        (
            "scale",
            "backward:0",
            "unscale_:0",
            "scale",
            "backward:1",
            "unscale_:1",
            "step:0",
            "step:1",
            "update",
        ),
        ("scale", "backward:0", "unscale_:0", "update", *PLAIN),
        ("set", *PLAIN, "set"),
        (*PLAIN, "outside:0", *PLAIN),
        (*PLAIN, "backward:0", "outside:0") * 3,  # a phase in float32
        ("backward:0", "step:0", "update") * 2,  # scale() inside a compiled graph
    ],
)
def test_healthy_orders_are_silent(calls):
    assert play(*calls) == []


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        (("scale", "unscale_:0", "unscale_:0!"), ("unscale_twice", 0, True)),
        (("scale", "step:0", "unscale_:0!"), ("unscale_after_step", 0, True)),
        (("scale", "step:0", "step:0!"), ("step_twice", 0, True)),
        (("scale", "step:0", "scale", "step:0!"), ("missing_update", 0, True)),
        (("scale", "step:0", "scale", "unscale_:0!"), ("missing_update", 0, True)),
        (("update!",), ("update_without_step", None, True)),
        (("scale", "update!"), ("update_without_step", None, True)),
        ((*PLAIN, "scale", "update!"), ("update_in_accumulation", None, True)),
        ((*PLAIN, "scale", "set"), ("update_in_accumulation", None, False)),
        (("step:0!",), ("step_without_scale", 0, True)),
        (("unscale_:0!",), ("unscale_without_scale", 0, True)),
        (("scale", "lbfgs:0!"), ("closure_wanted", 0, True)),
        ((*PLAIN, "step:0"), ("step_without_scale", 0, False)),
        (
            ("scale", "backward:0", "unscale_:0", "backward:0", "step:0"),
            ("unscale_in_accumulation", 0, False),
        ),
        (("scale", "unscale_:0", "scale", "backward:0", "unscale_:0!"), ("unscale_in_accumulation", 0, True)),
        (("scale", "scale", "backward:0", "step:0", "update", "step:1"), ("step_after_update", 1, False)),
        (("scale", "backward:0", "step:0", "update", "step:1"), ("step_without_scale", 1, False)),
        ((*PLAIN, "outside:0", *PLAIN, "outside:0"), ("stepped_again", 0, False)),
        ((*PLAIN, "scale", "outside:0"), ("step_outside_scaler", 0, False)),
        (("scale", "unscale_:0", "outside:0"), ("step_after_unscale", 0, False)),
        (("scale", "closure:0!"), ("closure", 0, True)),
    ],
)
def test_each_fault_is_named_once(calls, fault):
    assert play(*calls) == [fault]


def test_a_step_with_gradients_of_a_scaled_loss_is_outside_in_any_window():
    (fault,) = Protocol().step_outside(1, is_scaled=True)
    assert (fault.fault, fault.optimizer, fault.order) == ("step_outside_scaler", 1, ["outside:1"])


@pytest.mark.parametrize(
    ("calls", "is_fed"), [(("backward:0",), True), ((), False), (("scale", "backward:0"), False)]
)
def test_a_backward_pass_without_a_scaled_loss_feeds_an_optimizer_unscaled(calls, is_fed):
    protocol = Protocol()
    play(*PLAIN, *calls, protocol=protocol)
    assert protocol.is_fed_unscaled(0) is is_fed


def test_a_refused_call_leaves_the_state_where_torch_leaves_it():
    assert play("scale", "unscale_:0", "unscale_:0!", "step:0", "update", *PLAIN) == [
        ("unscale_twice", 0, True)
    ]


def test_a_fault_carries_the_calls_up_to_it():
    protocol = Protocol()
    play("scale", "step:1", protocol=protocol)
    fault = protocol.close(protocol.step(1, closure=False), raised=True)
    assert fault == [CallFault("step_twice", 1, ["scale", "step:1", "step:1"], raised=True)]


def test_the_window_knows_whom_it_stepped_and_touched():
    protocol = Protocol()
    play("scale", "step:2", "unscale_:0", "scale", protocol=protocol)
    assert (protocol.window.stepped, protocol.window.touched, protocol.window.losses) == ([2], [0, 2], 2)


def test_a_long_accumulation_keeps_its_ends():
    protocol = Protocol()
    play(*["scale"] * 100, "step:0", protocol=protocol)
    assert protocol.window.order == ["scale"] * (LONGEST_ORDER - 1) + ["step:0"]


def test_a_window_without_an_end_keeps_a_bounded_number_of_calls():
    protocol = Protocol()
    play("step:0", *["scale"] * 10_000, "unscale_:1", protocol=protocol)
    window = protocol.window
    assert (len(window.first) + len(window.last), window.losses) == (LONGEST_ORDER, 10_000)
    assert window.order == ["step:0", *["scale"] * (LONGEST_ORDER - 2), "unscale_:1"]


def test_gradients_that_waited_for_an_update_are_told_from_those_of_a_bare_loss():
    waiting = ("scale", "backward:0", "backward:1", "step:0", "update")
    bare = (*PLAIN, "backward:1", "step:1", "update")
    assert play(*bare, *waiting, "step:1")[-1] == ("step_after_update", 1, False)
    assert [fault for fault, *_ in play(*bare, *bare)] == ["step_without_scale"] * 2


def test_an_optimizer_that_is_met_with_gradients_that_waited():
    protocol = Protocol()
    play("scale", "step:0", "update", protocol=protocol)
    protocol.waits(1)
    assert play("step:1", protocol=protocol) == [("step_after_update", 1, False)]


def scaled(moved, count):
    protocol = Protocol()
    return [(i, f.fault) for i in range(count) for f in protocol.scale(moved=moved(i))]


def test_weights_that_change_while_only_scale_is_called():
    assert scaled(lambda i: i > 0, 20) == [(5, "scale_without_step")]
    assert scaled(lambda i: i in (3, 6, 9, 12), 200) == []
    assert scaled(lambda _: False, 1000) == []  # a long accumulation


def test_only_scale_is_told_late_where_weights_are_not_known():
    assert scaled(lambda _: None, 1000) == [(255, "scale_without_step")]


def test_a_loop_that_steps_once_is_not_one_that_only_scales():
    protocol = Protocol()
    assert play(*PLAIN, protocol=protocol) == []
    assert [protocol.scale(moved=True) for _ in range(20)] == [[]] * 20
