"""Records: what leaves a training process, as bytes that the spool, the server and `diagnose` all read.

A *batch* is a header and a body. The header names the producer (one incarnation of one process), a sequence
number that makes delivery idempotent, the run, the rank, the kind and the digest of the body. The body holds
either events or the columns of a table, as little-endian arrays in msgpack.

Three kinds, from the dearest to the cheapest to lose:

* `events`    what happened once: the run's description, growth, backoff, skips, observations, the end.
* `attempts`  one row for each pass through `update()`: `ATTEMPT_COLUMNS`.
* `tensors`   one row for each tensor at a recorded attempt: `TENSOR_COLUMNS`.

Integers are `<i8`, flags `|u1`, reals `<f8`. NaN and infinities are data. A *missing* real is the one NaN with
the bits of `MISSING` (as R's NA): `is_missing` tells it from a NaN that was measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import InvalidBatch, UnsupportedVersion
from .stats.layout import HIST_BINS

FORMAT_VERSION: Final = 1
MOST_TOGETHER: Final = 256  # batches in one body

Kind = Literal["events", "attempts", "tensors"]
KINDS: Final[tuple[Kind, ...]] = ("events", "attempts", "tensors")

Array: TypeAlias = npt.NDArray[Any]
Table: TypeAlias = dict[str, Array]
"""Columns of equal length by name; `hist` is two-dimensional, (rows, 64)."""

_MISSING_BITS: Final = 0x7FF8_0000_0000_07A2
MISSING: Final[float] = float(np.array(_MISSING_BITS, dtype=np.uint64).view(np.float64)[()])

INT, FLAG, REAL = "<i8", "|u1", "<f8"

ATTEMPT_COLUMNS: Final[dict[str, str]] = {
    "attempt": INT,  # counts the passes through update() of this producer, from 0
    "stream": INT,  # index of the stream: a scaler with the set of optimizers stepped
    "step": INT,  # the user's own step, else optimizer steps taken before this attempt
    "time": REAL,  # s, Unix time at update()
    "scale": REAL,  # loss scale that this attempt's loss was multiplied by
    "scale_after": REAL,  # loss scale that update() left
    "growth_tracker": INT,  # clean attempts since the last change, after update(); -1 unknown
    "found_inf": FLAG,  # 1: an optimizer of this attempt met inf or NaN, and its step was skipped
    "stepped": INT,  # bit i: optimizer i went through scaler.step() in this attempt
    "skipped": INT,  # bit i: optimizer i met inf or NaN in this attempt
    "losses": INT,  # calls of scale() in this attempt
    "micro_batches": INT,  # accumulations into one parameter in this attempt; -1 unknown
    "updates": INT,  # of this scaler since the stream's attempt before: 2 in a GAN that updates for each; -1 unknown
    "loss": REAL,  # mean of the values passed to scale(), unscaled; missing where it cannot be read
    "norm": REAL,  # L2 norm of the true gradient; missing where an element is not finite
    "max_abs": REAL,  # largest finite |scaled gradient|
    "headroom_log2": REAL,  # log2(65504 / max_abs) over float16-born tensors; missing where none is known
    "numel": INT,  # gradient elements seen in this attempt; 0 where every gradient was None
    "n_inf": INT,
    "n_nan": INT,
    "n_zero": INT,
    "n_subnormal": INT,
    "n_below": INT,
    "lr": REAL,  # first group of the first stepped optimizer; missing where reading it would synchronise
    "residue": FLAG,  # 1: a gradient of an unscaled optimizer was neither None nor zero when its backward began
    "applied_nonfinite": FLAG,  # 1: an unscaled gradient was not finite although its scaled one was
}
TENSOR_COLUMNS: Final[dict[str, str]] = {
    "attempt": INT,
    "stream": INT,
    "tensor": INT,  # id of the tensor in this producer's `tensors` events
    "scale": REAL,  # loss scale of the attempt: the statistics are those of the scaled gradient
    "numel": INT,
    "n_inf": INT,
    "n_nan": INT,
    "n_zero": INT,
    "n_subnormal": INT,
    "n_below": INT,
    "n_offgrid": INT,
    "n_offgrid_bf16": INT,
    "max_abs": REAL,
    "sum_sq": REAL,
    "hist": INT,  # (rows, 64), see stats/layout.py
}
COLUMNS: Final[dict[Kind, dict[str, str]]] = {"attempts": ATTEMPT_COLUMNS, "tensors": TENSOR_COLUMNS}
REQUIRED: Final[dict[Kind, tuple[str, ...]]] = {
    "attempts": ("attempt", "scale"),
    "tensors": ("attempt", "tensor", "scale", "numel"),
}
LOGGED_PREFIX: Final = "log."  # what ampwatch.log() added: `log.<name>`, reals
OPTIMIZER_PREFIX: Final = "optimizer."  # of one optimizer: `optimizer.0.step`, `.norm`, `.lr.<group>`, reals

EVENT_TYPES: Final = frozenset(
    {
        "run",  # the run's description, once per producer: see docs/format.md for the fields of each type
        "scaler",
        "stream",
        "optimizers",
        "tensors",
        "origin",
        "autocast",
        "accumulated",
        "backward_order",
        "loss_dtype",
        "growth",
        "backoff",
        "skip",
        "set",
        "restored",
        "went_on",
        "calls",
        "call_fault",
        "finite_check",
        "forward_search",
        "operations",
        "float32_check",
        "local_gradients",
        "replicas",
        "fused_step",
        "weights",
        "sparse_overflow",
        "captured",
        "observers",
        "check",
        "fault",
        "dropped",
        "heartbeat",
        "finish",
    }
)

_PRODUCER = re.compile(r"[0-9a-f]{32}\Z")
RUN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}\Z")
RUN_ID_RULE: Final = "1 to 128 of A-Z a-z 0-9 . _ : @ - and begin with a letter or digit"
_ADDED = re.compile(r"(log\.[A-Za-z0-9_./ -]{1,64}|optimizer\.\d{1,3}\.(step|norm|lr\.\d{1,3}))\Z")
_MAX_COLUMNS = 256


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened once, or `repeat` times alike at consecutive attempts.

    `attempt`, `step` and `stream` are -1 where they do not apply; `time` is Unix time in seconds; `data` holds
    the fields of the type (docs/format.md).
    """

    type: str
    time: float
    attempt: int = -1
    step: int = -1
    stream: int = -1
    repeat: int = 1
    data: dict[str, Any] = {}


class Batch(msgspec.Struct, frozen=True):
    """The unit that is spooled, posted, stored and diagnosed: a header, and a body of bytes.

    (producer, seq) identifies it; the same key with another `digest` is a conflict. `seq` counts from 0 over all
    kinds of one producer.
    """

    version: int
    producer: str
    seq: int
    run: str
    rank: int
    kind: Kind
    digest: str
    body: bytes

    def table(self, names: Collection[str] | None = None) -> Table:
        """The columns of an `attempts` or `tensors` batch, as read-only views of the body. InvalidBatch if torn.

        Arguments:
            names: only `attempt` and these, of those that it has; all if None. All are checked.
        """
        return _decode_table(self.kind, self.body, names)

    def events(self) -> list[Event]:
        """The events of an `events` batch. InvalidBatch if the body cannot be read."""
        return _decode_events(self.body)


def is_added(name: str) -> bool:
    """Whether attempts may have a column of this name beside `ATTEMPT_COLUMNS`: logged, or of one optimizer."""
    return bool(_ADDED.match(name))


def is_missing(values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """True where a real is missing, which a measured NaN is not. Arguments: float64 values of any shape."""
    array = np.ascontiguousarray(values, dtype=np.float64)
    return cast("npt.NDArray[np.bool_]", array.view(np.uint64) == _MISSING_BITS)


def missing(shape: int | tuple[int, ...]) -> npt.NDArray[np.float64]:
    """A float64 array of missing values."""
    return np.full(shape, _MISSING_BITS, dtype=np.uint64).view(np.float64)


def pack_events(events: Iterable[Event], *, producer: str, seq: int, run: str, rank: int) -> Batch:
    """Encode events as a batch."""
    return _seal("events", msgspec.msgpack.encode(list(events)), producer, seq, run, rank)


def pack_table(
    kind: Literal["attempts", "tensors"],
    table: Mapping[str, npt.ArrayLike],
    *,
    producer: str,
    seq: int,
    run: str,
    rank: int,
) -> Batch:
    """Encode a table as a batch: columns are cast to the dtypes of `COLUMNS`, unknown `log.*` columns to reals."""
    columns: dict[str, tuple[str, int, bytes]] = {}
    for name, values in table.items():
        dtype = COLUMNS[kind].get(name, REAL)
        array = np.ascontiguousarray(values, dtype=dtype)
        columns[name] = (dtype, array.shape[1] if array.ndim == 2 else 1, array.tobytes())
    return _seal(kind, msgspec.msgpack.encode(columns), producer, seq, run, rank)


def to_bytes(batch: Batch) -> bytes:
    """The bytes of a batch, as they stand in the spool and in a request."""
    return _ENCODER.encode(batch)


def from_bytes(data: bytes) -> Batch:
    """Read a batch from msgpack. Raises InvalidBatch or UnsupportedVersion; the body is checked by its digest."""
    try:
        batch = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        _check_version(data, msgspec.msgpack.decode)  # another version may look different
        raise _invalid(error) from error
    _refuse_other(batch.version)
    _check_header(batch)
    if digest_of(batch.body) != batch.digest:
        raise InvalidBatch("digest", "it is not the digest of the body: the batch was damaged on the way")
    return batch


def from_json(data: bytes) -> Batch:
    """Read a batch from JSON: the header's fields, and `events` or `columns` as lists.

    NaN and infinities are the strings "NaN", "Infinity", "-Infinity"; null is missing.
    """
    _check_version(data, msgspec.json.decode)
    try:
        given = msgspec.json.decode(data, type=_JsonBatch)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _invalid(error) from error
    key = {"producer": given.producer, "seq": given.seq, "run": given.run, "rank": given.rank}
    if given.kind == "events":
        batch = _pack_given_events(given.events, key)
    else:
        kind = given.kind
        table = {name: _from_list(kind, name, values) for name, values in given.columns.items()}
        batch = pack_table(kind, table, **key)  # type: ignore[arg-type]
    _check_header(batch)
    return batch


def join(batches: Iterable[Batch]) -> bytes:
    """Several batches as one body: an array of msgpack, of the bytes of each."""
    return msgspec.msgpack.encode([to_bytes(batch) for batch in batches])


def split(data: bytes) -> list[bytes]:
    """What was joined, for `from_bytes`. InvalidBatch where it is no such array, or of more than `MOST_TOGETHER`."""
    try:
        return _TOGETHER_DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _invalid(error) from error


def check(batch: Batch) -> None:
    """Decode the body and check its types, lengths and required columns. Raises InvalidBatch."""
    if batch.kind == "events":
        batch.events()
    else:
        batch.table()


def digest_of(body: bytes) -> str:
    """BLAKE2b-128 of a body, in hexadecimal."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def to_json_value(value: float) -> float | str | None:
    """A real as JSON can write it: itself, "NaN", "Infinity", "-Infinity", or None where it is missing."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return None if is_missing(value).item() else "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def to_json_list(values: npt.ArrayLike) -> list[Any]:
    """`to_json_value` over an array; integers and flags pass through."""
    array = np.asarray(values)
    if array.dtype.kind != "f":
        return cast("list[Any]", array.tolist())
    finite = np.isfinite(array)
    if array.ndim > 1:
        whole = finite.reshape(len(array), -1).all(axis=1).tolist()
        return [row.tolist() if plain else to_json_list(row) for row, plain in zip(array, whole, strict=True)]
    listed: list[Any] = array.tolist()
    for i in np.flatnonzero(~finite).tolist():
        listed[i] = to_json_value(listed[i])
    return listed


class _Form(NamedTuple):
    """How a column lies in a body."""

    dtype: str
    numpy: np.dtype[Any]
    width: int
    row_bytes: int


class _JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    producer: str
    seq: int
    run: str
    kind: Kind
    version: int = FORMAT_VERSION
    rank: int = 0
    events: list[Event] = []
    columns: dict[str, list[Any]] = {}


class _Version(msgspec.Struct):
    version: int = FORMAT_VERSION


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Batch)
_TOGETHER_DECODER = msgspec.msgpack.Decoder(Annotated[list[bytes], msgspec.Meta(max_length=MOST_TOGETHER)])
_COLUMNS_DECODER = msgspec.msgpack.Decoder(dict[str, tuple[str, int, bytes]])
_EVENTS_DECODER = msgspec.msgpack.Decoder(list[Event])
_JSON_REALS = {None: MISSING, "NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _seal(kind: Kind, body: bytes, producer: str, seq: int, run: str, rank: int) -> Batch:
    return Batch(FORMAT_VERSION, producer, seq, run, rank, kind, digest_of(body), body)


def _check_version(data: bytes, decode: Any) -> None:
    try:
        version = decode(data, type=_Version).version
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _invalid(error) from error
    _refuse_other(version)


def _refuse_other(version: int) -> None:
    if version != FORMAT_VERSION:
        raise UnsupportedVersion(
            "version", f"got {version}, this ampwatch reads {FORMAT_VERSION}: upgrade the older of the two"
        )


def _check_header(batch: Batch) -> None:
    if not _PRODUCER.match(batch.producer):
        raise InvalidBatch("producer", "it must be 32 lower-case hexadecimal digits")
    if not RUN_ID.match(batch.run):
        raise InvalidBatch("run", f"it must be {RUN_ID_RULE}")
    if not 0 <= batch.seq < 2**63:
        raise InvalidBatch("seq", f"got {batch.seq}, it counts from 0")
    if not 0 <= batch.rank < 2**31:
        raise InvalidBatch("rank", f"got {batch.rank}, ranks count from 0")


def _invalid(error: Exception) -> InvalidBatch:
    """Turn msgspec's message, `… - at `$.columns`…`, into a field and a reason."""
    reason, _, path = str(error).partition(" - at ")
    field = path.strip("`").removeprefix("$.").removeprefix("$")
    return InvalidBatch(field or "body", reason)


def _decode_table(kind: Kind, body: bytes, names: Collection[str] | None) -> Table:
    if kind == "events":
        raise InvalidBatch("kind", "an events batch holds no table")
    try:
        columns = _COLUMNS_DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidBatch("columns", str(error)) from error
    if len(columns) > _MAX_COLUMNS:
        raise InvalidBatch("columns", f"got {len(columns)}, at most {_MAX_COLUMNS} are allowed")
    for name in REQUIRED[kind]:
        if name not in columns:
            raise InvalidBatch(f"columns.{name}", f"it is required in {kind}")
    forms, rows = _FORMS[kind], len(columns["attempt"][2]) // _FORMS[kind]["attempt"].row_bytes
    for name, (dtype, width, data) in columns.items():
        form = forms.get(name) or _form_of(kind, name)
        if dtype != form.dtype or width != form.width or len(data) != rows * form.row_bytes:
            raise _misfit(name, columns[name], form, rows)
    chosen = [name for name in columns if names is None or name in names or name == "attempt"]
    return {name: _view(kind, name, columns[name][2]) for name in chosen}


def _misfit(name: str, column: tuple[str, int, bytes], form: _Form, rows: int) -> InvalidBatch:
    """What is wrong with a column that has not the form it must have."""
    dtype, width, data = column
    length, rest = divmod(len(data), form.row_bytes)
    reason = f"got {length} rows, `attempt` has {rows}"
    if dtype != form.dtype:
        reason = f"got dtype {dtype!r}, it must be {form.dtype!r}"
    elif width != form.width:
        reason = f"got width {width}"
    elif rest:
        reason = f"{len(data)} bytes are not whole rows of {dtype}"
    return InvalidBatch(f"columns.{name}", reason)


def _view(kind: Kind, name: str, data: bytes) -> Array:
    form = _FORMS[kind].get(name) or _form_of(kind, name)
    array = np.frombuffer(data, form.numpy)
    return array.reshape(-1, form.width) if form.width > 1 else array


def _form_of(kind: Kind, name: str) -> _Form:
    dtype, width = _dtype_of(kind, name), HIST_BINS if name == "hist" else 1
    return _Form(dtype, np.dtype(dtype), width, np.dtype(dtype).itemsize * width)


def _dtype_of(kind: Kind, name: str) -> str:
    dtype = COLUMNS[kind].get(name)
    if dtype is None:
        if kind != "attempts" or not is_added(name):
            raise InvalidBatch(
                f"columns.{name}", f"{kind} have no such column; what log() adds begins with 'log.'"
            )
        return REAL
    return dtype


def _decode_events(body: bytes) -> list[Event]:
    try:
        events = _EVENTS_DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        invalid = _invalid(error)
        raise InvalidBatch(f"events{invalid.field.removeprefix('body')}", invalid.reason) from error
    for i, event in enumerate(events):
        if event.type not in EVENT_TYPES:
            raise InvalidBatch(
                f"events[{i}].type", f"got {event.type!r}, it must be one of {sorted(EVENT_TYPES)}"
            )
    return events


def _pack_given_events(events: list[Event], key: dict[str, Any]) -> Batch:
    try:
        return pack_events(events, **key)
    except OverflowError as error:
        raise InvalidBatch("events", str(error)) from error


def _from_list(kind: Kind, name: str, values: list[Any]) -> Array:
    dtype = _dtype_of(kind, name)
    try:
        if dtype == REAL:
            values = [_JSON_REALS[v] if v is None or isinstance(v, str) else v for v in values]
        elif values and np.array(values).dtype.kind not in "iub":
            raise ValueError("whole numbers of 64 bits are wanted")
        array = np.array(values, dtype=dtype)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise InvalidBatch(
            f"columns.{name}", f"cannot be read as {dtype}: {json.dumps(str(error))}"
        ) from error
    if array.shape[1:] != ((HIST_BINS,) if name == "hist" else ()):
        raise InvalidBatch(f"columns.{name}", f"got shape {array.shape}")
    return array


_FORMS: Final[dict[Kind, dict[str, _Form]]] = {
    kind: {name: _form_of(kind, name) for name in COLUMNS.get(kind, ())} for kind in KINDS
}
"""Of the columns that every batch has: to make a numpy dtype costs as much as to decode a short column."""
