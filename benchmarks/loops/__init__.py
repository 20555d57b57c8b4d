"""Training loops with and without a fault, by which the diagnosis is judged; none has seen its rules."""

from . import calls, fifth, forward, fourth, grid, handled, scales, second, setups, sixth, third, wholesome
from .lab import CLAIMED, LOOPS, Happened, Lab, Loop

__all__ = [
    "CLAIMED",
    "LOOPS",
    "Happened",
    "Lab",
    "Loop",
    "calls",
    "fifth",
    "forward",
    "fourth",
    "grid",
    "handled",
    "scales",
    "second",
    "setups",
    "sixth",
    "third",
    "wholesome",
]
