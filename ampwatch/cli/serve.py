"""`ampwatch serve`: the server and its dashboard, on a folder of recorded runs or on a database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ampwatch.errors import RunNotFound

from ._extra import needs


def serve(
    directory: Annotated[
        Path | None, typer.Argument(help="Folder of recorded runs to show as they grow; it is not changed.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8765,
    database: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the store; by default a SQLite file of the user's.")
    ] = None,
) -> None:
    """Show runs in the browser and take the records of training jobs. Ctrl-C stops it."""
    if directory is not None and not directory.is_dir():
        raise RunNotFound(f"{directory}: there is no such folder")
    with needs("ampwatch serve", "server"):
        from ampwatch_server.serve import serve as run_server
    run_server(directory=directory, host=host, port=port, database=database, ready=_tell)


def _tell(link: str) -> None:
    typer.echo(f"ampwatch: serving at {link}  (the link works once; Ctrl-C stops)")
