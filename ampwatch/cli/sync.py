"""`ampwatch sync`: what was recorded on this machine, to a server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ampwatch.errors import AmpwatchError, SettingsError
from ampwatch.settings import Settings

from ._json import as_json
from ._places import RECORDED

if TYPE_CHECKING:
    from ampwatch.handover import Handover, Report


def sync(
    directory: Annotated[Path, typer.Argument(help="Folder of recorded runs, or of one.")] = RECORDED,
    server: Annotated[
        str | None, typer.Option(help="Address of the server.", show_default="AMPWATCH_SERVER")
    ] = None,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete what the server has, of processes that have ended.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Send also what was sent before.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send recorded runs to a server. What it has already is stored once; what is broken off can be run again."""
    from ampwatch.handover import Handover

    settings = Settings.load(server=server)
    if not settings.server:
        raise SettingsError("server: name it with --server https://ampwatch.example.org, or AMPWATCH_SERVER")
    handover = Handover(directory, settings.server, settings.token, again=again)
    try:
        _send(handover)
        report = handover.delete() if delete else handover.report
    except OSError as error:
        raise AmpwatchError(f"{error.filename or directory}: {error.strerror}") from error
    typer.echo(as_json(asdict(report)) if json_ else _told(report, settings.server))
    if report.refused or report.unreadable:
        raise typer.Exit(1)


def _send(handover: Handover) -> None:
    """Send, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total = handover.left_bytes
        bar = progress.add_task("", total=total)
        handover.send(lambda: progress.update(bar, completed=total - handover.left_bytes))


def _told(report: Report, server: str) -> str:
    """What became of it, a line each."""
    is_news = report.stored or report.refused or report.unreadable
    lines = [f"{report.stored:,} batches are at {server}" if is_news else f"nothing new: all is at {server}"]
    lines += [f"{count:,} refused: {why}" for why, count in report.refused.items()]
    lines += [f"{report.unreadable:,} cannot be read"] if report.unreadable else []
    lines += [f"deleted {name}" for name in report.deleted]
    lines += [f"kept {name}: {why}" for name, why in report.kept.items()]
    return "\n".join(lines)
