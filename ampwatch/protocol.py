"""The order of scale, unscale_, step and update, per optimizer: what torch refuses, and what trains wrongly.

A *window* is the time between two updates. In it an optimizer goes ready → unscaled → stepped, as in
torch.amp.GradScaler, and `update()` makes every optimizer ready again. A call is announced before torch sees it
(`unscale`, `step`, `update`), which tells what is wrong with it, and closed with what torch did (`close`), which
moves the state only where torch moved its own.

Healthy, and therefore silent: several scale() calls in a window (several losses, gradient penalty, accumulation),
an update per optimizer, an update(new_scale) at any time, an unscale_() whose step the user left out, and every
call of an optimizer that this scaler never steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

Fault = Literal[
    "unscale_twice",
    "unscale_after_step",
    "step_twice",
    "update_without_step",
    "step_without_scale",
    "unscale_without_scale",
    "unscale_in_accumulation",
    "update_in_accumulation",
    "step_after_update",
    "step_outside_scaler",
    "step_after_unscale",
    "stepped_again",
    "unscaled_backward",
    "divided_by_hand",
    "scale_without_step",
    "scale_unused",
    "missing_update",
    "closure",
    "closure_wanted",
]

MOVED: Final = 5  # times that weights changed between two scale() calls, and the scaler has never stepped
UNSTEPPED: Final = 256  # scale() calls without anything else, where it is not known whether weights change
LONGEST_ORDER: Final = 64  # calls kept of a window: its first and its last 32, whatever the accumulation


@dataclass(frozen=True)
class CallFault:
    """A call out of order: docs/format.md, `call_fault`. `raised`: torch refused it with an exception."""

    fault: Fault
    optimizer: int | None
    order: list[str]
    raised: bool


@dataclass(frozen=True)
class Call:
    """A call that was announced and is not closed yet; `fault` is what is wrong with it."""

    name: Literal["unscale_", "step", "update"]
    optimizer: int | None
    fault: Fault | None


@dataclass
class _Optimizer:
    stage: Literal["ready", "unscaled", "stepped"] = "ready"
    accumulated: bool = False  # a backward pass added to the gradients after they were unscaled
    fed: bool = False  # a backward pass added to its gradients in this window
    outside: bool = False  # stepped outside the scaler, before any loss of the window
    losses: int = 0  # scale() calls of the window when it was stepped


@dataclass
class Window:
    """The calls since the last update, and where each optimizer stands."""

    first: list[str] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LONGEST_ORDER // 2))
    losses: int = 0
    optimizers: dict[int, _Optimizer] = field(default_factory=dict)

    @property
    def order(self) -> list[str]:
        """The calls as events give them: at most `LONGEST_ORDER`, the middle left out."""
        return [*self.first, *self.last]

    @property
    def stepped(self) -> list[int]:
        """Optimizers that went through scaler.step() in the window, ascending."""
        return sorted(i for i, state in self.optimizers.items() if state.stage == "stepped")

    @property
    def touched(self) -> list[int]:
        """Optimizers that were stepped or unscaled in the window, ascending."""
        return sorted(i for i, state in self.optimizers.items() if state.stage != "ready")

    def add(self, call: str) -> None:
        """Keep a call, and forget one of the middle if there are too many."""
        (self.first if len(self.first) < LONGEST_ORDER // 2 else self.last).append(call)


class Protocol:
    """State machine over the calls of one scaler. Host only: it never touches a device."""

    def __init__(self) -> None:
        self.window = Window()
        self._before = Window()  # the one that the last update ended
        self._fed: set[int] = set()  # optimizers of which it is known when backward adds to their gradients
        self._has_scaled = False
        self._has_stepped = False
        self.only_scales = True
        """Whether nothing but scale() was called yet."""
        self._moved = 0

    def scale(self, *, moved: bool | None = None, used: bool = True) -> list[CallFault]:
        """A loss was scaled; torch refuses it never.

        Arguments:
            moved: whether weights have changed since the last call, as long as `only_scales`; None: not known.
            used: whether a backward pass has come through a loss that was scaled before.
        """
        self.window.add("scale")
        self.window.losses += 1
        self._has_scaled = True
        if not self.only_scales:
            return []
        self._moved += bool(moved)
        if not (moved and self._moved == MOVED) and not (moved is None and self.window.losses == UNSTEPPED):
            return []
        fault: Fault = "scale_without_step" if used else "scale_unused"
        return [CallFault(fault, None, self.window.order, raised=False)]

    def accumulated(self, optimizer: int) -> None:
        """A backward pass has added to the gradients of an optimizer."""
        state = self._optimizer(optimizer)
        state.accumulated = state.accumulated or state.stage == "unscaled"
        state.fed = True
        self._fed.add(optimizer)

    def waits(self, optimizer: int) -> None:
        """One that is met now has gradients that were there before the last update, and are as they were."""
        self._fed.add(optimizer)

    def unscale(self, optimizer: int) -> Call:
        """Announce an explicit unscale_(); the one inside step() is not announced."""
        self._called(f"unscale_:{optimizer}")
        state = self._optimizer(optimizer)
        fault: Fault | None = None
        if state.stage == "unscaled":
            fault = "unscale_in_accumulation" if state.accumulated else "unscale_twice"
        elif state.stage == "stepped":
            fault = self._step_again(state, "unscale_after_step")
        elif not self._has_scaled:
            fault = "unscale_without_scale"
        return Call("unscale_", optimizer, fault)

    def step(self, optimizer: int, *, closure: bool, wanted: bool = False) -> Call:
        """Announce a step(); `closure`: the optimizer was handed one; `wanted`: it cannot be stepped without."""
        self._called(f"step:{optimizer}")
        state = self._optimizer(optimizer)
        fault: Fault | None = None
        if closure:
            fault = "closure"
        elif state.stage == "stepped":
            fault = self._step_again(state, "step_twice")
        elif state.accumulated:
            fault = "unscale_in_accumulation"
        elif self.window.losses == 0:
            fault = self._without_loss(optimizer, state)
        elif wanted:
            fault = "closure_wanted"
        return Call("step", optimizer, fault)

    def update(self, *, manual: bool) -> Call:
        """Announce an update(); `manual`: with a new scale."""
        self._called("update")
        return Call("update", None, self._update_fault(manual))

    def step_outside(self, optimizer: int, *, is_scaled: bool = False) -> list[CallFault]:
        """An optimizer of this scaler stepped outside scaler.step().

        It is wrong once a loss of the window was scaled; before that, if it applies once more what scaler.step() has
        applied, in two windows in a row.

        Arguments:
            is_scaled: its gradients are known to be those of a scaled loss.
        """
        self.window.add(f"outside:{optimizer}")
        if self.window.losses or is_scaled:
            is_unscaled = self._optimizer(optimizer).stage == "unscaled"
            fault: Fault = "step_after_unscale" if is_unscaled else "step_outside_scaler"
            return [CallFault(fault, optimizer, self.window.order, raised=False)]
        if not self._repeats(optimizer):
            return []
        return [CallFault("stepped_again", optimizer, self._before.order, raised=False)]

    def unscaled_backward(self, optimizer: int) -> list[CallFault]:
        """An optimizer's gradients are divided by the scale, and come from a backward pass of a loss as it is."""
        return [CallFault("unscaled_backward", optimizer, self.window.order, raised=False)]

    def is_fed_unscaled(self, optimizer: int) -> bool:
        """Whether a backward pass has added to its gradients in a window in which no loss was scaled."""
        return self.window.losses == 0 and self._optimizer(optimizer).fed

    def close(self, call: Call, *, raised: bool) -> list[CallFault]:
        """Close an announced call; `raised`: it ended in an exception. Answers its fault, if it has one."""
        fault = call.fault
        if fault == "step_without_scale" and not (raised or self._has_scaled):
            fault = None  # every scale() is inside a compiled graph, where it is not seen
        if fault in ("unscale_without_scale", "closure_wanted") and not raised:
            fault = None  # a scale from elsewhere, of which step() tells; a step that was skipped
        order = self.window.order
        if not raised:
            self._advance(call)
        return [CallFault(fault, call.optimizer, order, raised)] if fault else []

    def _advance(self, call: Call) -> None:
        if call.optimizer is None:
            self._before, self.window = self.window, Window()
            return
        state = self._optimizer(call.optimizer)
        state.stage = "unscaled" if call.name == "unscale_" else "stepped"
        state.accumulated = False
        state.losses = self.window.losses
        self._has_stepped = self._has_stepped or state.stage == "stepped"

    def _called(self, call: str) -> None:
        self.window.add(call)
        self.only_scales = False

    def _without_loss(self, optimizer: int, state: _Optimizer) -> Fault:
        """A step in a window without a loss: of gradients that an update came before, or of a loss never scaled."""
        waited = self._before.losses and not state.fed and optimizer not in self._before.stepped
        is_known = optimizer in self._fed or self._before.losses > 1
        return "step_after_update" if waited and is_known else "step_without_scale"

    def _repeats(self, optimizer: int) -> bool:
        state, before = self._optimizer(optimizer), self._before.optimizers.get(optimizer)
        if before is None or before.stage != "stepped" or state.fed or state.outside:
            return False
        state.outside = True
        return before.outside

    def _step_again(self, state: _Optimizer, otherwise: Fault) -> Fault:
        """A second cycle that began with a loss of its own lacks an update; one that did not repeats a call."""
        return "missing_update" if self.window.losses > state.losses else otherwise

    def _update_fault(self, manual: bool) -> Fault | None:
        if self.window.touched:
            return None
        if self.window.losses and self._has_stepped:
            return "update_in_accumulation"
        return None if manual else "update_without_step"

    def _optimizer(self, index: int) -> _Optimizer:
        return self.window.optimizers.setdefault(index, _Optimizer())
