"""`ampwatch replay`: what other settings would have done to a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ampwatch import spool
from ampwatch.errors import InvalidPolicy, RunNotFound

from ._json import as_json
from ._places import RECORDED, tell_damaged

if TYPE_CHECKING:
    from ampwatch.replay import Recommendation, Recording, WhatIf
    from ampwatch.replay.whatif import Effect


def replay(
    path: Annotated[
        Path, typer.Argument(help="Folder of one recorded run; or a trace, .csv or .jsonl.")
    ] = RECORDED,
    policy: Annotated[str | None, typer.Option(help="Scaler to replay; torch by default.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of it; repeatable.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Whose attempts; by default the lowest rank's.")] = None,
    scaler: Annotated[int, typer.Option(help="Index of the scaler, where a run has several.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay another setting over a recorded run: steps lost, underflow, bounds. Without a setting, recommend one."""
    from ampwatch.replay import recommend, what_if

    recording = _recording(path, rank, scaler)
    if policy is None and not set_:
        recommended = recommend(recording)
        if json_:
            typer.echo(as_json({"recommendations": [one.as_dict() for one in recommended]}))
        else:
            _print_recommended(recommended)
        return
    replayed = what_if(recording, policy or "torch", dict(map(_parameter, set_ or [])))
    if json_:
        typer.echo(as_json(replayed.as_dict()))
    else:
        _print_replayed(replayed)


def _recording(path: Path, rank: int | None, scaler: int) -> Recording:
    from ampwatch.diagnosis import read_trace
    from ampwatch.replay import recording_of

    if path.is_file():
        return recording_of(read_trace(path).batches, rank=rank, scaler=scaler)
    runs = spool.run_directories(path)
    if len(runs) > 1:
        raise RunNotFound(
            f"{path} holds {len(runs)} runs; name the folder of one: {', '.join(list(runs)[:3])}, …"
        )
    tell_damaged(path)
    return recording_of(spool.read(path), rank=rank, scaler=scaler)


def _parameter(text: str) -> tuple[str, Any]:
    """`init_scale=2**16` as its name and number."""
    name, equals, value = text.partition("=")
    base, power, exponent = value.partition("**")
    try:
        number = float(base) ** float(exponent) if power else float(base)
    except (ValueError, OverflowError):
        number = {"true": True, "false": False, "none": None}.get(value.lower(), ...)
    if not equals or number is ...:
        raise InvalidPolicy(f"--set {text}", "it must be NAME=VALUE, the value a number as 65536 or 2**16")
    return name.strip(), number


def _print_recommended(recommended: list[Recommendation]) -> None:
    for one in recommended:
        typer.echo(one.text)
        if one.worst is not None:
            typer.echo(f"    skipped {_range(one.best, one.worst)}, as recorded {one.recorded.skipped:,}")
        if one.code:
            typer.echo(f"    {one.code}")
    if not recommended:
        typer.echo("no attempt was recorded: there is nothing to replay")


def _print_replayed(replayed: WhatIf) -> None:
    effects = replayed.effects
    rows = [("", "skipped", "underflow", "scale at the end")]
    rows.append(("as recorded", *_cells(replayed.recorded)))
    rows += [(f"replayed, {case}", *_cells(effects[case])) for case in ("best", "likely", "worst")]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    typer.echo(f"{replayed.code} over {replayed.attempts:,} attempts")
    for row in rows:
        typer.echo("  " + "  ".join(map(str.ljust, row, widths)).rstrip())
    for case, effect in effects.items():
        if effect.stopped:
            typer.echo(f"{case}: {effect.stopped}, at attempt {effect.stopped_at}")
    if replayed.hopeless:
        typer.echo(f"{replayed.hopeless:,} of the skips had a loss that is not finite: no scale takes them")


def _cells(effect: Effect) -> tuple[str, str, str]:
    share = "unknown" if effect.underflow_share is None else f"{effect.underflow_share:.2%}"
    return f"{effect.skipped:,}", share, f"{effect.final_scale:g}"


def _range(low: int | None, high: int | None) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
