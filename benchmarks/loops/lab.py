"""Where a loop is run: it hands out the scaler, ends the loop early where asked, and remembers what was trained.

A loop is a function of (lab, fault) and of the lab's seed that trains something and returns what happened. With `fault=False` the
same loop is healthy. What must be said of it stands in the decorator.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ampwatch

# The kinds that the product claims to name: each has a page.
CLAIMED = frozenset(page.stem for page in Path(__file__).parents[2].glob("docs/faults/*.md"))


class TracedScaler(torch.amp.GradScaler):
    """torch's own scaler that notes the scale before and after each update."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path: list[float] = []

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if not self.path:
            self.path.append(self.get_scale())
        super().update(new_scale)
        self.path.append(self.get_scale())


@dataclass
class Lab:
    """One run of one loop; with `plain` under torch's own scaler, unrecorded."""

    dir: Path
    run: str
    seed: int = 0
    limit: int | None = None  # iterations
    plain: bool = False
    models: list[nn.Module] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    trace: Path | None = None  # what the loop has logged itself, to be diagnosed in place of a recorded run
    policy: str = "torch"  # of the scaler that the trace is of

    def scaler(
        self, model: nn.Module, device: str = "cpu", *, named: bool = True, **options: Any
    ) -> torch.amp.GradScaler:
        """A scaler for the model, which it is told of unless `named` is False."""
        self.models.append(model)
        if self.plain:
            scaler: torch.amp.GradScaler = TracedScaler(device, **options)
        else:
            settings = ampwatch.Settings.load(run=self.run, dir=self.dir, quiet=True)
            scaler = ampwatch.GradScaler(device, model=model if named else None, settings=settings, **options)
        self.scalers.append(scaler)
        return scaler

    def watch(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Record an optimizer that no scaler steps."""
        self.models.append(model)
        if not self.plain:
            settings = ampwatch.Settings.load(run=self.run, dir=self.dir, quiet=True)
            ampwatch.watch_optimizer(optimizer, model=model, settings=settings)

    def steps(self, count: int, start: int = 0) -> Iterator[int]:
        for step in range(start, count):
            if self.limit is not None and step >= self.limit:
                return
            yield step

    def log(self, **values: float) -> None:
        """Tell the recorder what a scaler cannot see."""
        if not self.plain:
            ampwatch.log(**values)  # type: ignore[arg-type]

    def note(self, loss: torch.Tensor) -> float:
        self.losses.append(float(loss.detach()))
        return self.losses[-1]

    def restart(self) -> None:
        """The job ends here, and a new one carries the same run on."""
        if not self.plain:
            ampwatch.finish()

    def digest(self) -> str:
        """Of all weights, buffers and scaler states: equal digests, equal training."""
        total = hashlib.sha256()
        for model in self.models:
            for name, value in sorted(model.state_dict().items()):
                total.update(name.encode())
                total.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for scaler in self.scalers:
            total.update(repr(sorted(scaler.state_dict().items())).encode())
        return total.hexdigest()[:16]


@dataclass(frozen=True)
class Happened:
    """What a loop knows of its own fault: the attempt of onset, and by which attempt it must have been named."""

    onset: int | None = None
    by: int | None = None


Body = Callable[[Lab, bool], Happened | None]


@dataclass(frozen=True)
class Loop:
    name: str
    body: Body
    kind: str | None  # None: healthy whatever is asked
    severity: tuple[str, ...] = ()
    where: tuple[str, ...] = ()  # modules or tensors, any of which is right
    within: int | None = None
    per_step: int = 1  # attempts per iteration
    raises: tuple[type[BaseException], ...] = ()
    accept: tuple[str, ...] = ()  # kinds that are right too
    set: str = "first"  # loops that were written together

    @property
    def claimed(self) -> bool:
        return self.kind is None or self.kind in CLAIMED


LOOPS: dict[str, Loop] = {}


def add(loop: Loop) -> None:
    """Register a loop; ValueError where another has its name."""
    if LOOPS.setdefault(loop.name, loop) is not loop:
        raise ValueError(f"two loops are named {loop.name}")


def _set_of(body: Callable[..., Any]) -> str:
    _, part, *_ = body.__module__.split(".")
    return part if part in ("second", "third", "fourth", "fifth", "sixth", "grid") else "first"


def faulty(
    kind: str,
    *severity: str,
    within: int | None = None,
    where: tuple[str, ...] = (),
    per_step: int = 1,
    raises: tuple[type[BaseException], ...] = (),
    accept: tuple[str, ...] = (),
) -> Callable[[Body], Body]:
    """Register a loop whose fault is of this kind."""

    def register(body: Body) -> Body:
        name, set = body.__name__, _set_of(body)
        add(Loop(name, body, kind, severity, where, within, per_step, raises, accept, set))
        return body

    return register


def healthy(body: Callable[[Lab], None]) -> Callable[[Lab], None]:
    """Register a loop of which nothing above info may be said."""
    add(Loop(body.__name__, lambda lab, _: body(lab), None, set=_set_of(body)))
    return body


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def first_fall(path: list[float]) -> int | None:
    """The attempt at which the scale fell first."""
    return next((i for i in range(1, len(path)) if path[i] < path[i - 1]), None)
