"""The Triton kernel on the CPU, under Triton's interpreter, in a process of its own.

Triton decides once, when it is imported, whether it interprets: other tests must not share that.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from ampwatch.stats import fused, trial
from ampwatch.stats import triton_kernel as kernel
from ampwatch.stats.choose import Statistics
from ampwatch.stats.layout import WIDTH
from ampwatch.stats.tables import TO_THE_END


class Interpreter:
    """Calls the functions below in the other process."""

    def __init__(self) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        command = [sys.executable, "-W", "error", __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump((name, arguments), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def unscale(grads: list[Tensor], inverse: float) -> tuple[Tensor, list[Tensor], float]:
    """Rows of statistics, the gradients unscaled, and found_inf."""
    found_inf = torch.zeros(1)
    versions = [grad._version for grad in grads]
    rows = fused.unscale_with_statistics_(grads, found_inf, torch.tensor([inverse]))
    assert [grad._version for grad in grads] == [version + 1 for version in versions]
    return rows, grads, found_inf.item()


def fail_late(grads: list[Tensor], inverse: float) -> tuple[str, list[Tensor]]:
    """Unscaling whose last launch fails: the error, and what it leaves of the gradients."""
    prepare, remaining = fused._prepare, len({grad.dtype for grad in grads})

    def last_fails(*given: Any) -> fused.Launch:
        nonlocal remaining
        remaining -= 1
        return prepare(*given) if remaining else _fail

    with mock.patch.object(fused, "_rehearse"), mock.patch.object(fused, "_prepare", last_fails):
        try:
            fused.unscale_with_statistics_(grads, torch.zeros(1), torch.tensor([inverse]))
        except Exception as error:  # noqa: BLE001 - which one it is, is what is asked
            return repr(error), grads
    raise AssertionError("it has not failed")


def _fail() -> None:
    raise ZeroDivisionError("late")


def statistics(grads: list[Tensor]) -> tuple[Tensor, list[bool]]:
    """Rows of statistics, and which gradients the kernel took."""
    return fused.statistics_of(grads), [fused.handles(grad) for grad in grads]


def tried(dtype: torch.dtype) -> tuple[bool, str]:
    """What `ampwatch doctor` would find of a device that were this interpreter."""
    ticks = iter((100.0, 130.0, 900.0))  # torch's pass, ours, and the reference
    passes = Statistics("triton", fused.statistics_of, fused.unscale_with_statistics_)
    cases = trial.cases("cpu", [dtype], sizes=(0, 1, 5, 4097), many=40, large=9001)
    return tuple(trial.verdict(passes, "cpu", lambda _: next(ticks), cases))


def far_end(last: list[float]) -> Tensor:
    """Statistics of the last tile of 2^31 + 5 float16 elements; the memory before it is never touched."""
    grad = torch.empty(2**31 + 5, dtype=torch.float16)
    grad[-5:] = torch.tensor(last)
    return _one_item(grad, 2**31 // 4096)


def one_item(grad: Tensor) -> Tensor:
    """Statistics of a whole tensor, taken by one program of the grid."""
    return _one_item(grad, 0)


def _one_item(grad: Tensor, first: int) -> Tensor:
    """The kernels with a single work item, from tile `first` to the end."""
    counts = torch.empty(1, kernel.COUNT_WIDTH, dtype=torch.int32)
    reals, out = torch.empty(1, 2, dtype=torch.float64), torch.empty(1, WIDTH, dtype=torch.float64)
    sizes, address = torch.tensor([grad.numel()]), torch.tensor([grad.data_ptr()])
    items = torch.tensor([0, first, TO_THE_END])
    dtype, (rows, columns) = kernel.dtype_named(str(grad.dtype)), kernel.tile_shape(grad.itemsize)
    kernel.scan[(1,)](address, sizes, items, counts, reals, None, None, dtype, rows, columns)
    kernel.gather[(1,)](sizes, torch.tensor([0, 1]), torch.tensor([0]), counts, reals, out)
    return out.squeeze(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # numpy warns of infinities that are meant
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr
    while sys.stdin.buffer.peek(1):
        name, arguments = pickle.load(sys.stdin.buffer)
        pickle.dump(globals()[name](*arguments), answers)
        answers.flush()
