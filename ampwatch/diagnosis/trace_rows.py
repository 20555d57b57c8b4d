"""The rows of a trace, as people have them: CSV by comma, semicolon, tab or spaces, JSON lines, a JSON array, or a log.

A column is known by its name here or by an alias, whatever its case, spaces and prefix: `train/Grad Norm` is `norm`.
Where none is called `attempt` the step is taken for it. What cannot be read is left out and told, and what was read
for what as well, where names are not ours.
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
from .trace_logs import count_of_skips, lines_of

Row = dict[str, float]

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "attempt": ("iteration", "iter", "num_updates", "global_step", "step"),
    "scale": ("loss_scale", "amp_scale", "grad_scale", "scaler_scale", "cur_scale"),
    "scale_after": ("new_scale",),
    "found_inf": ("overflow", "skipped", "skip", "inf", "is_overflow", "number_of_skipped_iterations"),
    "loss": ("train_loss", "lm_loss", "total_loss"),
    "norm": ("grad_norm", "gradient_norm", "gradnorm", "gnorm", "global_grad_norm", "total_norm"),
    "lr": ("learning_rate",),
    "batch_id": ("batch", "batch_idx"),
}
_EVALUATED: Final = re.compile(r"(^|[_/ ])(eval|valid|validation|val|test)[_/ ]")
_SPECIAL: Final = re.compile(r"([+-]?)(?:(nan|1\.#ind|1\.#qnan)(?:\([^)]*\))?|(inf|infinity|1\.#inf|∞))")
_THOUSANDS: Final = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_TENSOR: Final = re.compile(r"tensor\(([^,()]+)(?:,.*)?\)")
_TAG: Final = re.compile(r"tag-(.+)$")
_FLAGS: Final = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
_KNOWN: Final = frozenset({*ATTEMPT_COLUMNS, "attempt", "rank", "batch_id", "epoch"})
_MOST_NAMES: Final = 16
_COUNTS: Final = ("attempt", "rank", "stream")
_MOST: Final = 2.0**53  # integers that a float holds


class Read(NamedTuple):
    """Rows in the order of the file, each with an attempt and a scale.

    Arguments:
        notes: what of the file could not be read.
        names: what its names were read as.
    """

    rows: list[Row]
    notes: list[str]
    names: str


def read_rows(path: Path) -> Read:
    """Read the rows of a file.

    Errors: RunNotFound where there is no such file; InvalidBatch for a file or a row that cannot be read.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise RunNotFound(f"there is no trace at {path}") from None
    except UnicodeDecodeError as error:
        raise InvalidBatch("trace", f"{path} is not text: {error}") from error
    unread = _Unread()
    try:
        rows = [_checked(*told, unread) for told in _told(path, text, unread)]
    except InvalidBatch as error:
        if skips := count_of_skips(text):
            raise InvalidBatch(str(path), texts.ONLY_SKIPS.format(lines=texts.times(skips, "line"))) from None
        raise InvalidBatch(f"{path}, {error.field}", error.reason) from None
    except (csv.Error, RecursionError) as error:
        raise InvalidBatch("trace", f"{path} holds what is no row: {error}") from error
    if not rows:
        raise InvalidBatch("trace", f"{path} holds no row")
    return Read(_in_order(rows, unread), unread.notes(), unread.read())


class _Unread:
    """What was left out of a file."""

    def __init__(self) -> None:
        self.words: dict[str, list[str]] = {}  # by column
        self.is_cut = False
        self.repeats = False
        self.names: dict[str, str] = {}  # what names of the file were read as
        self.lines = 0  # of a log that tell no attempt

    def read(self) -> str:
        """Which names that are not ours were read as what, and which have no meaning here; empty for neither."""
        names = {name: column for name, column in self.names.items() if isinstance(name, str)}
        known = [f"`{name}` as {told}" for name, told in names.items() if told in _KNOWN and name != told]
        free = [f"`{name}`" for name, column in names.items() if column not in _KNOWN]
        return " ".join(
            texts.READ[key].format(
                names=", ".join(some[:_MOST_NAMES]) + (" …" if len(some) > _MOST_NAMES else "")
            )
            for key, some in (("as", known), ("free", free))
            if some
        )

    def notes(self) -> list[str]:
        told = [
            texts.NOT_JUDGED["unread"].format(
                column=column, count=texts.times(len(words), "row"), word=words[0]
            )
            for column, words in self.words.items()
        ]
        told += [texts.NOT_JUDGED["cut"]] if self.is_cut else []
        told += (
            [texts.NOT_JUDGED["lines"].format(lines=texts.times(self.lines, "line"))] if self.lines else []
        )
        return [*told, texts.NOT_JUDGED["repeats"]] if self.repeats else told


def _told(path: Path, text: str, unread: _Unread) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a file by their line, cells as they are."""
    if log := lines_of(text):
        unread.lines = sum(map(bool, map(str.strip, text.splitlines()))) - len(log)
        yield from log
    elif text.lstrip()[:1] in ("{", "["):
        yield from _json(text, unread)
    else:
        yield from _csv(text, _TAG.search(path.stem))


def _csv(text: str, tag: re.Match[str] | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows of a table, with comments before it, and its header once more where a job was begun again."""
    lines = text.splitlines()
    comments = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0)
    head, lines = lines[comments] if lines else "", lines[comments:]
    delimiter = max(",;\t", key=head.count)
    delimiter = delimiter if delimiter in head else " "
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    names = list(reader.fieldnames or ())
    if tag is not None and {"Step", "Value"} <= set(
        names
    ):  # TensorBoard exports each tag to a file of its own
        names = reader.fieldnames = [_of_tag(tag[1]) if name == "Value" else name for name in names]
    _check_names(names)
    for number, row in enumerate(reader, start=comments + 2):
        if list(row.values()) != names:
            yield number, _with_points(row) if delimiter == ";" else row


def _of_tag(tag: str) -> str:
    """`train_loss_scale` → `loss_scale`: of a tag with its groups, the longest end that is a name."""
    names = {name for column, aliases in ALIASES.items() for name in (column, *aliases)}
    parts = tag.lower().split("_")
    ends = ("_".join(parts[i:]) for i in range(len(parts)))
    return next((end for end in ends if end in names), tag)


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
    name = name.rpartition(" - ")[2]  # the run, in an export of Weights & Biases
    last = name if _EVALUATED.search(name) else name.rpartition("/")[2]
    return re.sub(r"\W+", "_", last).strip("_")


def _checked(number: int, row: Mapping[str, Any], unread: _Unread) -> Row:
    columns = _columns(tuple(row))
    unread.names.update(columns)
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
    word = told[1].strip() if (told := _TENSOR.fullmatch(word)) else word
    if word in _FLAGS:
        return _FLAGS[word]
    if special := _SPECIAL.fullmatch(word):
        return math.nan if special[2] else math.copysign(math.inf, -1.0 if special[1] == "-" else 1.0)
    if _THOUSANDS.fullmatch(word):
        word = word.replace(",", "")
    try:
        return float(word) if word[-1].isdigit() or word[-1] == "." else None
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
