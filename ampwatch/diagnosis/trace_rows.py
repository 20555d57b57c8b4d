"""The rows of a trace, as people have them: CSV by comma, semicolon or tab, JSON lines, or a JSON array.

A column is known by its name here or by an alias, whatever its case, spaces and prefix: `train/Grad Norm` is `norm`.
Where none is called `attempt` the step is taken for it. What cannot be read is left out and told.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ampwatch.errors import InvalidBatch, RunNotFound
from ampwatch.records import ATTEMPT_COLUMNS

from . import texts

Row = dict[str, float]

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "attempt": ("iteration", "iter", "num_updates", "global_step", "step"),
    "scale": ("loss_scale", "amp_scale", "grad_scale", "scaler_scale", "cur_scale"),
    "scale_after": ("new_scale",),
    "found_inf": ("overflow", "skipped", "skip", "inf", "is_overflow"),
    "loss": ("train_loss", "lm_loss", "total_loss"),
    "norm": ("grad_norm", "gradient_norm", "gradnorm", "gnorm", "global_grad_norm", "total_norm"),
    "lr": ("learning_rate",),
    "batch_id": ("batch", "batch_idx"),
}
_EVALUATED: Final = re.compile(r"(^|[_/ ])(eval|valid|validation|val|test)[_/ ]")
_TEXT: Final = frozenset({"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"})
_FLAGS: Final = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
_COUNTS: Final = ("attempt", "rank", "stream")
_MOST: Final = 2.0**53  # integers that a float holds


class Read(NamedTuple):
    """Rows in the order of the file, each with an attempt and a scale, and what of the file could not be read."""

    rows: list[Row]
    notes: list[str]


def read_rows(path: Path) -> Read:
    """Read the rows of a file.

    Errors: RunNotFound where there is no such file; InvalidBatch for a file or a row that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise RunNotFound(f"there is no trace at {path}") from None
    except UnicodeDecodeError as error:
        raise InvalidBatch("trace", f"{path} is not text: {error}") from error
    unread = _Unread()
    is_json = text.lstrip()[:1] in ("{", "[")
    try:
        rows = [_checked(*told, unread) for told in (_json(text, unread) if is_json else _csv(text))]
    except InvalidBatch as error:
        raise InvalidBatch(f"{path}, {error.field}", error.reason) from None
    except (csv.Error, RecursionError) as error:
        raise InvalidBatch("trace", f"{path} holds what is no row: {error}") from error
    if not rows:
        raise InvalidBatch("trace", f"{path} holds no row")
    return Read(_in_order(rows, unread), unread.notes())


class _Unread:
    """What was left out of a file."""

    def __init__(self) -> None:
        self.words: dict[str, list[str]] = {}  # by column
        self.is_cut = False
        self.repeats = False

    def notes(self) -> list[str]:
        told = [
            texts.NOT_JUDGED["unread"].format(
                column=column, count=texts.times(len(words), "row"), word=words[0]
            )
            for column, words in self.words.items()
        ]
        told += [texts.NOT_JUDGED["cut"]] if self.is_cut else []
        return [*told, texts.NOT_JUDGED["repeats"]] if self.repeats else told


def _csv(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = text.splitlines()
    delimiter = max(",;\t", key=lambda mark: lines[0].count(mark)) if lines else ","
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    _check_names(reader.fieldnames or ())
    for number, row in enumerate(reader, start=2):
        yield number, _with_points(row) if delimiter == ";" else row


def _with_points(row: Mapping[str, Any]) -> dict[str, Any]:
    """The cells of a table whose decimals may be written with a comma."""
    return {name: cell.replace(",", ".") if isinstance(cell, str) else cell for name, cell in row.items()}


def _json(text: str, unread: _Unread) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, row in _array(text) if text.lstrip().startswith("[") else _objects(text, unread):
        if not isinstance(row, dict):
            raise InvalidBatch(f"line {number}", "it must be an object, one for each attempt")
        yield number, row


def _array(text: str) -> Iterator[tuple[int, Any]]:
    try:
        yield from enumerate(json.loads(text), start=1)
    except ValueError as error:
        raise InvalidBatch("body", f"it is not JSON: {error}") from error


def _objects(text: str, unread: _Unread) -> Iterator[tuple[int, Any]]:
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            if number == len(lines) > 1 and not text.endswith("\n"):
                unread.is_cut = True  # its job was killed as it wrote
                return
            raise InvalidBatch(f"line {number}", f"it is not JSON: {error}") from error


def _check_names(names: Sequence[str]) -> None:
    found = set(_columns(tuple(names)).values())
    for name in ("attempt", "scale"):
        if names and name not in found:
            known = ", ".join((name, *ALIASES[name]))
            raise InvalidBatch(
                f"line 1.{name}", f"got the columns {', '.join(names)}, one of {known} is required"
            )


@lru_cache(maxsize=64)  # rows have the same names, as a rule
def _columns(names: tuple[str, ...]) -> dict[str, str]:
    """What each name of a file means; a name of ours goes before an alias, and the first before the others."""
    plain = {name: _plain(name) for name in names if isinstance(name, str)}
    found = {
        name: told for name, told in plain.items() if told in ATTEMPT_COLUMNS or told in ("attempt", "rank")
    }
    for column, aliases in ALIASES.items():
        if column not in found.values():
            told = next((name for alias in aliases for name in plain if plain[name] == alias), None)
            if told is not None:
                found[told] = column
    return {**{name: told for name, told in plain.items() if name not in found}, **found}


def _plain(name: str) -> str:
    """`lm loss` → `lm_loss`, `train/loss` → `loss`; what is measured in an evaluation keeps its prefix."""
    name = name.strip().lower()
    last = name if _EVALUATED.search(name) else name.rpartition("/")[2]
    return re.sub(r"\W+", "_", last).strip("_")


def _checked(number: int, row: Mapping[str, Any], unread: _Unread) -> Row:
    columns = _columns(tuple(row))
    named: dict[str, Any] = {}
    for name, cell in row.items():
        named.setdefault(columns.get(name, ""), cell)
    if "attempt" not in named and "step" in named:
        named["attempt"] = named["step"]
    numbers = {column: x for column, cell in named.items() if (x := _number(cell)) is not None}
    for name in ("attempt", "scale"):
        if name not in numbers:
            raise InvalidBatch(f"line {number}.{name}", f"it is required, got {named.get(name)!r}")
    if not numbers["scale"] >= 0:
        raise InvalidBatch(f"line {number}.scale", f"got {numbers['scale']:g}, a scale is not negative")
    for name in _COUNTS:
        x = numbers.get(name, 0.0)
        if not (x.is_integer() and 0 <= x < _MOST):
            raise InvalidBatch(f"line {number}.{name}", f"got {x:g}, {name}s count from 0")
    for column in ATTEMPT_COLUMNS.keys() & named.keys() - numbers.keys():
        if isinstance(named[column], str) and named[column].strip():
            unread.words.setdefault(column, []).append(named[column])
    return numbers


def _number(cell: Any) -> float | None:
    """A number; None for what is empty or is none."""
    if isinstance(cell, bool | int | float):
        try:
            return float(cell)
        except OverflowError:  # an integer of JSON; written as a real it is read so too
            return math.inf if cell > 0 else -math.inf
    if not isinstance(cell, str) or not cell.strip():
        return None
    word = cell.strip().lower()
    if word in _FLAGS:
        return _FLAGS[word]
    try:
        return float(word) if word in _TEXT or word[-1].isdigit() or word[-1] == "." else None
    except ValueError:
        return None


def _in_order(rows: list[Row], unread: _Unread) -> list[Row]:
    """The rows as they are, or, where attempts of a rank repeat, counted in the order of the file."""
    if not any(len(set(its)) < len(its) for its in _by_rank(rows)):
        return rows
    unread.repeats = True
    seen: dict[float, int] = {}
    counted = []
    for row in rows:
        at = seen[row.get("rank", 0.0)] = seen.get(row.get("rank", 0.0), -1) + 1
        counted.append({"step": row["attempt"], **row, "attempt": float(at)})
    return counted


def _by_rank(rows: Iterable[Row]) -> Iterable[list[float]]:
    attempts: dict[float, list[float]] = {}
    for row in rows:
        attempts.setdefault(row.get("rank", 0.0), []).append(row["attempt"])
    return attempts.values()
