"""The fields of events, as docs/format.md lists them: what a client sent that is none of these is not diagnosed.

The diagnosis reads events that any client may have posted. One whose fields are of other types is left out, so that
the rules can rely on what they find, and one bad event does not end the diagnosis of its run.
"""

from __future__ import annotations

from typing import Any, Final, TypedDict

import msgspec

from ampwatch.records import Event


class _Scaler(TypedDict, total=False):
    scaler: int
    policy: str
    enabled: bool | None
    asked: bool | None
    init_scale: float | None
    growth_factor: float | None
    backoff_factor: float | None
    growth_interval: int | None
    hysteresis: int | None
    replaces: int | None


class _Stream(TypedDict, total=False):
    stream: int
    scaler: int
    optimizers: list[int]


class _Optimizer(TypedDict, total=False):
    id: int
    fused: bool | None
    lr: list[float | None]
    eps: float | None
    tensors: int


class _Optimizers(TypedDict, total=False):
    optimizers: list[_Optimizer]


class _Tensor(TypedDict, total=False):
    id: int
    name: str
    module: str
    module_type: str
    shape: list[int]
    dtype: str
    numel: int


class _Tensors(TypedDict, total=False):
    tensors: list[_Tensor]


class _Origin(TypedDict, total=False):
    origins: dict[str, str]


class _Dtype(TypedDict, total=False):
    dtype: str


class _Autocast(_Dtype, total=False):
    device: str
    by_hand: bool
    elsewhere: str | None


class _Change(TypedDict, total=False):
    scale: float
    scale_after: float


class _Restored(_Change, total=False):
    growth_tracker: int | None


class _Skip(_Change, total=False):
    optimizers: list[int]


class _CallFault(TypedDict, total=False):
    fault: str
    optimizer: int | None
    order: list[str]
    raised: bool
    since: int


class _Finite(TypedDict, total=False):
    checked: int
    nonfinite: list[str]
    count: int


class _Parameters(_Finite, total=False):
    reach: float | None


class _FiniteCheck(TypedDict, total=False):
    parameters: _Parameters
    buffers: _Finite


class _Seen(TypedDict, total=False):
    module: str
    module_type: str
    input_max_abs: float | None
    output_max_abs: float | None
    children_max_abs: float | None
    output_n_inf: int
    output_n_nan: int


class _ForwardSearch(TypedDict, total=False):
    origin: _Seen | None
    path: list[_Seen]
    inputs_finite: bool | None
    parameters_finite: bool | None
    outputs_finite: bool | None


class _Loss(TypedDict, total=False):
    finite: bool
    inputs_finite: bool | None
    float16: list[str]


class _Softmax(TypedDict, total=False):
    module: str
    rows: int
    masked: int
    overflowed: int


class _Operations(TypedDict, total=False):
    loss: _Loss | None
    softmax: _Softmax | None


class _Float32Check(TypedDict, total=False):
    module: str
    module_type: str
    output_n_nan: float
    output_numel: float
    float32_max_abs: float
    input_max_abs: float
    weight_max_abs: float


class _FusedStep(TypedDict, total=False):
    optimizer: int
    lr: float | None
    scale: float
    gradient: float
    gradient_after: float
    moved: float
    unscaled: bool
    found_inf: float
    moment: float
    state: float
    count: float


class _Weights(TypedDict):
    optimizer: int
    tensors: list[int]
    lr: float
    since: int
    steps: int
    compared: int
    with_gradient: int
    moved: int


class _Accumulated(TypedDict, total=False):
    optimizers: list[int]
    nonfinite: list[int]


class _LocalGradients(TypedDict, total=False):
    tensors: list[int]
    nonfinite: list[int]


class _Replicas(TypedDict, total=False):
    tensors: list[int]
    first: int | None


class _SparseOverflow(TypedDict, total=False):
    tensors: list[int]


class _Dropped(TypedDict, total=False):
    kind: str
    first_seq: int
    last_seq: int
    reason: str
    first_attempt: int
    last_attempt: int
    count: int


class _Shared(TypedDict, total=False):
    optimizer: int
    count: int
    tensors: list[str]


class _Missed(TypedDict):
    count: int
    tensors: list[str]


class _WithoutGrad(TypedDict, total=False):
    count: int
    tensors: list[str]
    elements: int


class _Check(_Optimizer, total=False):
    missed: _Missed
    unowned: int
    instead: _Missed | None
    on_meta: _Missed
    devices: list[str]
    without_grad: _WithoutGrad
    low: dict[str, list[str]]
    state_dtypes: list[str]
    steps_before: int | None
    shared: list[_Shared]


SHAPES: Final[dict[str, Any]] = {
    "scaler": _Scaler,
    "stream": _Stream,
    "optimizers": _Optimizers,
    "tensors": _Tensors,
    "origin": _Origin,
    "autocast": _Autocast,
    "loss_dtype": _Dtype,
    "growth": _Change,
    "backoff": _Change,
    "set": _Change,
    "restored": _Restored,
    "skip": _Skip,
    "call_fault": _CallFault,
    "finite_check": _FiniteCheck,
    "forward_search": _ForwardSearch,
    "operations": _Operations,
    "float32_check": _Float32Check,
    "fused_step": _FusedStep,
    "weights": _Weights,
    "accumulated": _Accumulated,
    "local_gradients": _LocalGradients,
    "replicas": _Replicas,
    "sparse_overflow": _SparseOverflow,
    "dropped": _Dropped,
    "check": _Check,
}
_LONGEST_ID: Final = 18  # digits: a tensor's id fits 64 bits


def fits(event: Event) -> bool:
    """Whether the fields of an event have the types that docs/format.md gives them; fields beyond those are free."""
    try:
        msgspec.convert(event.data, SHAPES.get(event.type, dict[str, Any]))
    except msgspec.ValidationError:
        return False
    ids = event.data.get("origins", {}) if event.type == "origin" else {}
    return all(key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID for key in ids)
