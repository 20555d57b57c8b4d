"""What the numbers of a forward search say: which module made inf or NaN of finite inputs. Pure, torch-free.

The module that is looked for is the *innermost one with finite inputs and a non-finite output*. Attention scores
that overflow inside a module without a module of their own name that module, and not the one behind it that was
handed the NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .stats.layout import SCALARS

Numbers: TypeAlias = npt.NDArray[np.float64]

MOST_IN_PATH: Final = 8
STATISTICS: Final = SCALARS[: SCALARS.index("max_abs") + 1]
COLUMNS: Final = (*STATISTICS, "is_mask")
"""What is kept of each tensor: of its statistics, and whether it is an additive mask."""


class Call(NamedTuple):
    """One call of a module that has returned. `inputs` and `outputs` say which measured tensors are its own."""

    number: int  # in the order in which modules are entered
    parent: int  # number of the call that made it; -1 for one from outside the model
    module: str
    module_type: str
    inputs: range
    outputs: range


@dataclass(frozen=True)
class Trace:
    """The calls of a pass, in the order in which they returned.

    Arguments:
        is_first_call: nothing of the model ran before the first call, so that its inputs come from elsewhere.
    """

    calls: tuple[Call, ...]
    n_tensors: int  # measured
    is_first_call: bool

    @property
    def outermost(self) -> list[Call]:
        """The calls from outside the model: one of the whole, or several of its parts."""
        return [call for call in self.calls if call.parent < 0]


def told(traces: Sequence[Trace], numbers: Numbers) -> dict[str, Any]:
    """Data of the `forward_search` event: of the first pass whose outputs are not finite, else of the first.

    Arguments:
        numbers: whether all parameters are finite; then, pass by pass, tensors × COLUMNS.
    """
    passes = list(_split(traces, numbers[1:]))
    chosen = next((each for each in passes if not each.outputs_finite), passes[0])
    return {**chosen.as_data(), "parameters_finite": bool(numbers[0])}


def _split(traces: Sequence[Trace], numbers: Numbers) -> Iterator[_Pass]:
    start = 0
    for trace in traces:
        end = start + trace.n_tensors * len(COLUMNS)
        yield _Pass(trace, numbers[start:end].reshape(-1, len(COLUMNS)))
        start = end


@dataclass(frozen=True)
class _Range:
    """The numbers of several tensors: how many there are, and how far they reach."""

    n_inf: int
    n_nan: int
    masked: int  # those of n_inf that are -inf in an attention mask
    max_abs: float | None  # over finite elements; None where there is no tensor

    @property
    def finite(self) -> bool:
        return self.n_inf + self.n_nan == self.masked


class _Seen(NamedTuple):
    """A call with its numbers."""

    call: Call
    inputs: _Range
    outputs: _Range


class _Pass:
    """A pass with its numbers."""

    def __init__(self, trace: Trace, numbers: Numbers) -> None:
        self._trace = trace
        self._rows = [dict(zip(COLUMNS, row, strict=True)) for row in numbers.tolist()]
        self._seen = [
            _Seen(call, self._range(call.inputs), self._range(call.outputs)) for call in trace.calls
        ]
        self._outermost = [each for each in self._seen if each.call.parent < 0]

    @property
    def outputs_finite(self) -> bool:
        return all(each.outputs.finite for each in self._outermost)

    @property
    def inputs_finite(self) -> bool | None:
        """Whether the model was given finite inputs. Of several calls from outside a later one may have been given
        what an earlier one returned: None where only such inputs are not finite.
        """
        if all(each.inputs.finite for each in self._outermost):
            return True
        is_given = self._trace.is_first_call and not self._outermost[0].inputs.finite
        return False if is_given else None

    def as_data(self) -> dict[str, Any]:
        origin = self._origin()
        broken = [each for each in self._seen if not each.outputs.finite]
        return {
            "origin": None if origin is None else self._described(origin),
            "path": [self._described(each) for each in broken[:MOST_IN_PATH]],
            "inputs_finite": self.inputs_finite,
            "outputs_finite": self.outputs_finite,
        }

    def _range(self, tensors: range) -> _Range:
        rows = [self._rows[i] for i in tensors]
        return _Range(
            n_inf=int(sum(row["n_inf"] for row in rows)),
            n_nan=int(sum(row["n_nan"] for row in rows)),
            masked=int(sum(row["n_inf"] * row["is_mask"] for row in rows)),
            max_abs=max((row["max_abs"] for row in rows), default=None),
        )

    def _origin(self) -> _Seen | None:
        """The first to return a non-finite output for finite inputs: what it calls returns before it does.

        Only what reaches the outermost module counts. Scores masked with -inf by a module of their own are finite
        again after the softmax.
        """
        by_number = {each.call.number: each for each in self._seen}
        return next(
            (each for each in self._seen if each.inputs.finite and _reaches_out(each, by_number)), None
        )

    def _described(self, each: _Seen) -> dict[str, Any]:
        inside = [child.outputs.max_abs for child in self._seen if child.call.parent == each.call.number]
        return {
            "module": each.call.module,
            "module_type": each.call.module_type,
            "input_max_abs": each.inputs.max_abs,
            "input_n_nonfinite": each.inputs.n_inf + each.inputs.n_nan - each.inputs.masked,
            "output_n_inf": each.outputs.n_inf,
            "output_n_nan": each.outputs.n_nan,
            "output_max_abs": each.outputs.max_abs,
            "children_max_abs": max((x for x in inside if x is not None), default=None),
        }


def _reaches_out(seen: _Seen | None, by_number: dict[int, _Seen]) -> bool:
    """Whether the outputs of a call and of all that made it are not finite. One that never returned is passed over."""
    while seen is not None:
        if seen.outputs.finite:
            return False
        seen = by_number.get(seen.call.parent)
    return True
