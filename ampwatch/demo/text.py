"""Real text that every machine has: the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

VOCABULARY = 128  # ASCII; every other character becomes `?`


def load(characters: int = 1_000_000) -> torch.Tensor:
    """The first `characters` characters of the standard library's modules in alphabetical order.

    Returns:
        int64 codes below `VOCABULARY`, shape (≤ characters,), on the CPU.
    """
    kept: list[bytes] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if size >= characters:
            break
        kept.append(path.read_text("utf-8", errors="replace").encode("ascii", errors="replace"))
        size += len(kept[-1])
    if not size:
        raise FileNotFoundError(f"no *.py file in {sysconfig.get_paths()['stdlib']}")
    return torch.frombuffer(bytearray(b"".join(kept)[:characters]), dtype=torch.uint8).long()


def batch(
    text: torch.Tensor, rows: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text and the characters that follow: two int64 tensors, shape (rows, context)."""
    starts = torch.randint(len(text) - context - 1, (rows,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]
