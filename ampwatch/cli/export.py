"""`ampwatch export` and `ampwatch report`: a run as a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, BinaryIO
from urllib.parse import quote

import typer

from ampwatch import answers, spool
from ampwatch.errors import AmpwatchError, RunNotFound, SettingsError

from ._extra import needs
from ._places import RECORDED, tell_damaged

Run = Annotated[
    str,
    typer.Argument(help=f"Folder of a recorded run, or the id of one in ./{RECORDED} or on the --server."),
]
Server = Annotated[
    str | None, typer.Option(metavar="URL", help="Server to ask, instead of reading a folder.")
]


class Form(str, Enum):
    """How rows are written."""

    CSV = "csv"
    JSON = "json"
    NDJSON = "ndjson"


class Rows(str, Enum):
    """Which rows are written."""

    ATTEMPTS = "attempts"
    TENSORS = "tensors"
    EVENTS = "events"


class Theme(str, Enum):
    """Colours of a report."""

    LIGHT = "light"
    DARK = "dark"


def export(
    run: Run,
    form: Annotated[
        Form, typer.Option("--format", help="csv, json (one document) or ndjson (a line a row).")
    ] = Form.CSV,
    kind: Annotated[
        Rows, typer.Option(help="attempts, tensors (statistics of each) or events.")
    ] = Rows.ATTEMPTS,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
    server: Server = None,
) -> None:
    """Write every row of a run as it was recorded: attempts, statistics of tensors, or events."""
    if server is not None:
        query = {"format": form.value, "kind": kind.value}
        pieces = _asked(server, run, "export", query)
    else:
        with needs("ampwatch export", "server"):
            from ampwatch_server.offline import export_folder
        pieces = export_folder(*_recorded(run), form.value, kind.value)
    _write(pieces, output)


def report(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("report.html"),
    theme: Annotated[Theme, typer.Option(help="light or dark.")] = Theme.LIGHT,
    server: Server = None,
) -> None:
    """Write a run as one HTML file that needs no server: verdict, findings, plots and events."""
    if server is not None:
        pieces = _asked(server, run, "report", {"theme": theme.value})
    else:
        with needs("ampwatch report", "server"):
            from ampwatch_server.offline import report_folder
        pieces = report_folder(*_recorded(run), theme.value)
    _write(pieces, output)


def _recorded(run: str) -> tuple[Path, str]:
    """The folder of a recorded run, and the run's id."""
    folder = next((path for path in (Path(run), RECORDED / run) if path.is_dir()), None)
    if folder is None:
        raise RunNotFound(
            f"{run}: there is no such folder, nor is it in ./{RECORDED}; --server asks a server"
        )
    found = spool.run_directories(folder)
    if len(found) > 1:
        raise RunNotFound(f"{folder} holds {len(found)} runs, name one of them: {', '.join(sorted(found))}")
    [(name, path)] = found.items()
    tell_damaged(path)
    if next(spool.read(path), None) is None:
        raise RunNotFound(f"{path}: none of its records can be read")
    return path, name


def _asked(server: str, run: str, what: str, query: dict[str, str]) -> Iterator[bytes]:
    """The answer of a server, piece by piece.

    Errors: AmpwatchError says what it answered instead; SettingsError for an address that no token may be sent to.
    """
    import httpx

    from ampwatch.settings import read_token

    if refusal := answers.why_not(server):
        raise SettingsError(refusal)
    headers = {"Authorization": f"Bearer {read_token() or ''}"}
    url = f"{server.rstrip('/')}/v1/runs/{quote(run, safe='')}/{what}"
    proxied = answers.may_be_proxied(server)
    try:
        with httpx.stream(
            "GET", url, params=query, headers=headers, timeout=60, trust_env=proxied
        ) as response:
            if not response.is_success:
                response.read()
                raise AmpwatchError(f"{server} answered {response.status_code}: {_detail(response)}")
            yield from response.iter_bytes()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise AmpwatchError(f"{server} does not answer: {error}") from error


def _detail(response: object) -> str:
    try:
        told: str = response.json()["detail"]  # type: ignore[attr-defined]
    except (ValueError, KeyError, TypeError):
        return "it is not an ampwatch server"
    return told


def _write(pieces: Iterable[bytes], output: Path | None) -> None:
    """All pieces into a file, which is there whole or not at all; or to standard output."""
    if output is None:
        _copy(pieces, sys.stdout.buffer)
        return
    part = output.with_name(f".{output.name}.part")
    try:
        with part.open("wb") as file:
            size = _copy(_shown(pieces), file)
        os.replace(part, output)
    except OSError as error:
        raise AmpwatchError(f"{output}: cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    typer.echo(f"ampwatch: wrote {output}, {size:,} bytes", err=True)


def _copy(pieces: Iterable[bytes], file: BinaryIO) -> int:
    return sum(file.write(piece) for piece in pieces)


def _shown(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces, and how many bytes there were so far, for who waits at a terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), DownloadColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        for piece in pieces:
            progress.advance(task, len(piece))
            yield piece
