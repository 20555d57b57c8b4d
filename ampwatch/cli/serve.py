"""`ampwatch serve`: the server and its dashboard, on a folder of recorded runs or on a database."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ampwatch.errors import RunNotFound, SettingsError

from ._extra import needs
from ._keep import AttemptsDays, MaxGib, TensorsDays, keep_of
from ._places import RECORDED, recorded_here


def serve(
    directory: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of recorded runs to show as they grow; it is not changed.",
            show_default=f"./{RECORDED}, where there is one",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8765,
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the store; by default a SQLite file of the user's.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name that browsers reach it by, as a proxy's; may be repeated."),
    ] = None,
    root_path: Annotated[
        str, typer.Option(metavar="PATH", help="Path prefix under which a proxy shows it, as /ampwatch.")
    ] = "",
    log: Annotated[
        str, typer.Option(metavar="text|json", help="What is logged: text, or JSON lines with every request.")
    ] = "text",
    alerts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file of the webhooks that are told of findings.")
    ] = None,
    compactor: Annotated[
        str,
        typer.Option(metavar="process|thread", help="Where it folds and diagnoses: beside it, or within."),
    ] = "process",
    tensors_days: TensorsDays = None,
    attempts_days: AttemptsDays = None,
    max_gib: MaxGib = None,
) -> None:
    """Show runs in the browser and take the records of training jobs. Ctrl-C stops it."""
    if directory is not None and not directory.is_dir():
        raise RunNotFound(
            f"{directory}: there is no such folder" + (", it is a file" if directory.exists() else "")
        )
    with needs("ampwatch serve", "server"):
        from ampwatch_server.destinations import read_alerts
        from ampwatch_server.logs import set_up
        from ampwatch_server.retention import told
        from ampwatch_server.serve import serve as run_server
        from ampwatch_server.settings import default_database
    if log not in ("text", "json"):
        raise SettingsError(f"log: got {log!r}, it must be text or json")
    if compactor not in ("process", "thread"):
        raise SettingsError(f"compactor: got {compactor!r}, it must be process or thread")
    set_up("json" if log == "json" else "text")
    shown, keep = directory or recorded_here(), keep_of(tensors_days, attempts_days, max_gib)
    destinations = None if alerts is None else read_alerts(alerts)
    if log == "text":  # in JSON it is a line of the log
        typer.echo(f"ampwatch: {told(keep)}", err=True)
    run_server(
        directory=shown,
        host=host,
        port=port,
        database=database or default_database(directory),
        ready=_teller(shown),
        allowed_hosts=allowed_host or (),
        root_path=root_path,
        alerts=destinations,
        keep=keep,
        compactor="thread" if compactor == "thread" else "process",
    )


def _teller(shown: Path | None) -> Callable[[str], None]:
    """Prints one-time links: the first with what the server shows, the next when the one before has been opened."""
    runs = "the runs that jobs send" if shown is None else f"the runs in {shown}, and those that jobs send"
    first = f"serving {runs}; Ctrl-C stops\nampwatch: open"
    words = itertools.chain([first], itertools.repeat("that link has been opened; the next one is"))

    def tell(link: str) -> None:
        typer.echo(f"ampwatch: {next(words)} {link}  (works once)")

    return tell
