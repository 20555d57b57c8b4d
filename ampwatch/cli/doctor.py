"""`ampwatch doctor`: what works on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from ampwatch.settings import Settings

from ._json import as_json

_MARKS: Final = {"ok": "ok", "note": "-", "failed": "FAILED"}


def doctor(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Folder to record in, instead of AMPWATCH_DIR.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Server to stream to, instead of AMPWATCH_SERVER.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try what a training job here would use: torch, each statistics pass, the folder, the server."""
    from ampwatch.doctor import checks

    done = []
    for check in checks(Settings.load(dir=directory, server=server)):
        done.append(check)
        if not json_:
            typer.echo(f"{_MARKS[check.state]:8}{check.name:16}{check.says}")
    failed = any(check.state == "failed" for check in done)
    if json_:
        typer.echo(as_json({"ok": not failed, "checks": [check._asdict() for check in done]}))
    raise typer.Exit(int(failed))
