"""What a server keeps, as options of `ampwatch serve` and `ampwatch db prune`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ampwatch_server.settings import Keep

TensorsDays = Annotated[
    float | None,
    typer.Option(min=0, help="Days after which rows of tensors are dropped; 7 by default, inf for never."),
]
AttemptsDays = Annotated[
    float | None,
    typer.Option(min=0, help="Days after which rows of attempts are dropped; 90 by default, inf for never."),
]
MaxGib = Annotated[
    float | None,
    typer.Option(min=0, help="Size in GiB above which more is dropped; 64 by default, inf for none."),
]


def keep_of(tensors_days: float | None, attempts_days: float | None, max_gib: float | None) -> Keep:
    """The limits; what is not given is as a server has it."""
    from ampwatch_server.settings import Keep

    usual = Keep()
    return Keep(
        usual.tensors_days if tensors_days is None else _finite(tensors_days),
        usual.attempts_days if attempts_days is None else _finite(attempts_days),
        usual.max_bytes if max_gib is None else _bytes(max_gib),
    )


def _finite(limit: float) -> float | None:
    return limit if math.isfinite(limit) else None


def _bytes(gib: float) -> int | None:
    return int(gib * 2**30) if math.isfinite(gib) else None
