"""What the API answers, for its documentation: the server builds these as plain data (docs/rest.md).

A real is a number, one of the strings "NaN", "Infinity", "-Infinity", or null where it is missing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Real = Annotated[float | Literal["NaN", "Infinity", "-Infinity"] | None, Field(examples=[65536.0])]
Word = Literal["healthy", "warning", "failing", "no data"]
Severity = Literal["fatal", "error", "warning", "info"]
Mark = Literal["acknowledged", "muted"]


class Model(BaseModel):
    """Base of the answers: nothing beyond the fields that are named."""

    model_config = ConfigDict(extra="forbid")


class Problem(Model):
    """A problem document (RFC 9457)."""

    type: str = Field(examples=["about:blank"])
    title: str = Field(examples=["Unprocessable Entity"])
    status: int = Field(examples=[422])
    detail: str = Field(examples=["it is required in attempts"])
    field: str | None = Field(None, examples=["columns.scale"])


class Verdict(Model):
    """One sentence over a run."""

    word: Word
    severity: Severity | None
    kind: str | None = Field(examples=["forward_overflow"])
    sentence: str
    first_step: int
    module: str
    tensor: str
    not_judged: str = Field("", description="what was not recorded, so that nothing is said of it")


class Evidence(Model):
    """A measured fact."""

    text: str
    value: Real = None
    unit: str = ""
    attempt: int = -1
    tensor: str = ""


class Advice(Model):
    """Something to do."""

    text: str
    code: str = ""


class Link(Model):
    """One event of a chain: what began, in a few words, and since when."""

    kind: str
    text: str
    attempt: int
    step: int


class Finding(Model):
    """A fault, or an explained event."""

    key: str = Field(examples=["forward_overflow-0-5f0c9d1e-0-181"])
    kind: str
    severity: Severity
    headline: str
    first_attempt: int
    last_attempt: int
    first_step: int
    last_step: int
    evidence: list[Evidence]
    advice: list[Advice]
    confidence: float
    state: Literal["open", "recovered", "explained", "acknowledged"]
    rank: int
    producer: str
    stream: int
    module: str
    tensor: str
    chain: list[Link] = Field([], description="which event came first, and what followed from it")
    mark: Mark | None = Field(
        description="what a person made of it; where that is acknowledged, so is its state"
    )
    marked_by: str | None
    marked_at: float | None = Field(description="Unix time, s")


class FindingEdit(Model):
    """What can be changed of a finding; null takes the mark away."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"mark": "acknowledged"}})

    mark: Mark | None


class Findings(Model):
    """What the diagnosis says of a run."""

    verdict: Verdict
    findings: list[Finding]


class Producer(Model):
    """One incarnation of one process."""

    producer: str = Field(examples=["5f0c9d1e7ab34c0f9f3a1b2c3d4e5f60"])
    rank: int
    host: str
    device: str
    attempts: int
    skipped: int = Field(description="attempts in which an optimizer's step was skipped")
    begins: int = Field(description="attempts of the processes of its rank that came before it")
    last_seq: int
    last_seen: float = Field(description="by the server's clock, s")
    missing: list[int]
    finished: bool


class Sparkline(Model):
    """At most 60 points: mean loss, lowest scale."""

    loss: list[Real]
    scale_log2: list[Real]


class Run(Model):
    """One training."""

    run: str = Field(examples=["01JDQ5W3Z8R6J2N7V4K1T9M0XC"])
    project: str
    name: str
    tags: list[str]
    notes: str
    archived: bool
    status: Literal["live", "finished", "stalled", "crashed"]
    started: float = Field(description="Unix time, s", examples=[1764432000.0])
    last_seen: float = Field(description="Unix time, s", examples=[1764432060.0])
    attempts: int
    taken: int
    skipped: int
    step: int | None
    scale: Real
    loss: Real
    world_size: int | None
    producers: list[Producer]
    verdict: Verdict
    sparkline: Sparkline
    config: dict[str, Any]
    versions: dict[str, Any]
    scalers: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]


class RunPage(Model):
    """A page of runs."""

    items: list[Run]
    next: str | None


class RunEdit(Model):
    """What can be changed of a run; what is left out stays."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"name": "baseline", "tags": ["fp16"]}}
    )

    name: str | None = Field(None, max_length=1024)
    tags: list[Annotated[str, Field(max_length=128)]] | None = Field(None, max_length=64)
    notes: str | None = Field(None, max_length=65536)
    archived: bool | None = None


class Receipt(Model):
    """The acknowledgement of a batch: it is on the disk."""

    producer: str = Field(examples=["5f0c9d1e7ab34c0f9f3a1b2c3d4e5f60"])
    seq: int
    stored: bool = Field(description="false: it was stored before")
    last_seq: int | None = Field(
        description="highest sequence number that was stored of the producer before this batch, -1: none; lower than "
        "one that was acknowledged: the database was put back. null: nothing is known, as the run was deleted"
    )
    next_batch_s: float = Field(description="when to send the next one, s")


class Answer(Model):
    """What one of several batches would have been answered alone."""

    status: int = Field(description="of HTTP: 200, or that of a problem", examples=[200])
    body: Receipt | Problem
    retry_after_s: int | None = Field(None, description="when to send it again, s; as Retry-After")


class Answers(Model):
    """What became of several batches of one request, in their order."""

    answers: list[Answer]


class Points(Model):
    """One column over the points of a stream."""

    min: list[Real]
    max: list[Real]
    mean: list[Real]
    count: list[int]
    nan: list[int]
    inf: list[int]


class Stream(Model):
    """The points of one stream of one producer."""

    rank: int
    producer: str
    stream: int
    stride: int = Field(description="attempts that a point covers")
    attempt: list[int]
    step: list[int | None]
    time: list[Real]
    series: dict[str, Points]


class Series(Model):
    """Columns over attempts."""

    run: str
    names: list[str]
    streams: list[Stream]


class Difference(Model):
    """Something in which runs differ: its path, and the value of each run, null where a run lacks it."""

    name: str = Field(examples=["config.lr"])
    values: list[Any] = Field(examples=[[0.001, 0.0003]])


class Comparison(Model):
    """Runs beside each other, each list in the order in which they were asked for."""

    runs: list[Run]
    series: list[Series]
    differences: list[Difference]


class Event(Model):
    """Something that happened once, or `repeat` times alike."""

    id: int
    rank: int
    producer: str
    type: str = Field(examples=["skip"])
    time: Real
    attempt: int
    step: int
    stream: int
    repeat: int
    data: Any


class EventPage(Model):
    """A page of events."""

    items: list[Event]
    next: str | None


class Tensor(Model):
    """A gradient tensor of a producer."""

    id: int
    rank: int
    producer: str
    name: str = Field(examples=["blocks.1.attn.qkv.weight"])
    module: str | None
    module_type: str | None
    shape: list[int] | None
    dtype: str | None
    numel: int | None
    optimizer: int | None
    origin: str = Field(examples=["float16"])


class TensorPage(Model):
    """A page of tensors."""

    items: list[Tensor]
    next: str | None


class Heatmap(Model):
    """Tensors over attempts."""

    stat: str
    unit: str
    tensors: list[Tensor]
    attempt: list[int]
    step: list[int | None]
    values: list[list[Real]]


class Histograms(Model):
    """Histograms of one tensor over attempts."""

    tensor: int
    producer: str | None = Field(description="the one that recorded it; null where none has")
    bins_log2: list[int]
    attempt: list[int]
    step: list[int | None]
    scale: list[Real]
    hist: list[list[int]]


class Figure(Model):
    """A Plotly figure as data."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


class Alert(Model):
    """A destination of alerts; its URL is not shown."""

    name: str = Field(examples=["on call"])
    shape: Literal["json", "slack"]
    severity: Severity | None = Field(description="findings that are at least so severe are told")
    kinds: list[str]
    waiting: int
    sent: int
    not_sent: int = Field(description="given up, or of a finding that was marked first")
    last_outcome: str | None = Field(examples=["answered 200"])


class AlertPage(Model):
    """The destinations that the server was started with."""

    items: list[Alert]
    next: str | None


class AlertTest(Model):
    """What became of a test alert."""

    sent: bool
    outcome: str = Field(examples=["answered 200"])


class Token(Model):
    """A token of a program; its value is not known any more."""

    id: int
    name: str = Field(examples=["cluster"])
    scopes: list[Literal["read", "write", "admin"]]
    project: str | None = Field(description="whose runs it is for; null: every one")
    created: float = Field(description="Unix time, s")
    last_used: float | None = Field(description="Unix time, s, to about an hour")


class TokenPage(Model):
    """A page of tokens."""

    items: list[Token]
    next: str | None


class TokenAsked(Model):
    """A token to make."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"name": "cluster", "scopes": ["write"]}}
    )

    name: str = Field(min_length=1, max_length=128, pattern=r"\S")
    scopes: list[Literal["read", "write", "admin"]] = Field(min_length=1, max_length=3)
    project: str | None = Field(
        None, max_length=1024, pattern=r"\S", description="whose runs it is for; null: every one"
    )


class NewToken(Model):
    """A token's value, which is shown this once."""

    token: str
    name: str
    scopes: list[Literal["read", "write", "admin"]]
    project: str | None


class AuditEntry(Model):
    """Who did what, and when."""

    id: int
    time: float = Field(description="Unix time, s")
    who: str = Field(examples=["session browser 3"])
    action: str = Field(examples=["delete"])
    subject: str = Field(examples=["01JDQ5W3Z8R6J2N7V4K1T9M0XC"])


class AuditPage(Model):
    """A page of the audit, the newest first."""

    items: list[AuditEntry]
    next: str | None


class ReplayAsked(Model):
    """A policy and its parameters; what is left out is the policy's default."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {"policy": "torch", "parameters": {"init_scale": 65536, "growth_interval": 500}}
        },
    )

    policy: str = Field("torch", max_length=64, description="a key of `GET /v1/policies`")
    parameters: dict[Annotated[str, Field(max_length=64)], float | bool | None] = Field(
        default_factory=dict, max_length=16
    )


class ScalePath(Model):
    """The lowest and highest scale over each stretch of attempts."""

    attempt: list[int] = Field(description="first of each stretch")
    low: list[Real]
    high: list[Real]


class Effect(Model):
    """What a loss scale did, or would have done."""

    skipped: int = Field(description="attempts lost to overflow")
    final_scale: Real
    stopped: str | None = Field(description="what the scaler would have raised, and training with it")
    stopped_at: int | None = Field(description="the attempt at which")
    underflow_share: Real = Field(
        description="mean share of the elements computed in float16 that are lost; null where none is known"
    )


class EffectPath(Effect):
    """An effect and the path of the scale."""

    path: ScalePath


class Replayed(Model):
    """The replay under the lowest, the likely and the highest ceilings that the record allows."""

    worst: EffectPath
    likely: EffectPath
    best: EffectPath


class Replay(Model):
    """A policy replayed over a recorded run."""

    policy: str
    parameters: dict[str, float | bool | None]
    code: str = Field(description="the line to copy", examples=["torch.amp.GradScaler(growth_interval=500)"])
    attempts: int
    attempt_s: Real = Field(description="median time of an attempt, s")
    hopeless: int = Field(description="skipped attempts whose loss was not finite: no scale takes them")
    recorded: EffectPath
    replayed: Replayed
    figure: Figure | None = Field(description="where a theme was asked for")


class Recommendation(Model):
    """A setting and what it would have done."""

    kind: Literal["keep", "calibration", "probing", "underflow", "not_the_scale"]
    text: str
    code: str
    parameters: dict[str, float | bool | None]
    recorded: Effect
    replayed: Effect | None = Field(description="in the likely case")
    worst: int | None = Field(description="skipped attempts at worst")
    best: int | None = Field(description="skipped attempts at best")


class Recommendations(Model):
    """What to set, the most useful first; one entry `keep` where nothing is better."""

    scaler: dict[str, Any]
    recommendations: list[Recommendation]


class Policies(Model):
    """Policies by name, each with the defaults of its parameters."""

    policies: dict[str, dict[str, float | bool | None]]
