"""The command line: one module a command; this package alone may import the server, inside a command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ampwatch.errors import AmpwatchError

from .db import db_app
from .demo import demo
from .diagnose import diagnose
from .doctor import doctor
from .export import export, report
from .replay import replay
from .runs import runs
from .serve import serve
from .sync import sync
from .token import token_app

app = typer.Typer(
    name="ampwatch",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a usage error in plain lines, which a log takes
    help="Are the gradients of your mixed-precision training healthy, and if not, why?",
)
for command in (demo, serve, runs, diagnose, replay, export, report, sync, doctor):
    app.command()(command)
app.add_typer(token_app)
app.add_typer(db_app)


def _version(asked: bool) -> None:
    if asked:
        from ampwatch import __version__

        typer.echo(f"ampwatch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry of the console script: an AmpwatchError is one line on stderr and the exit status 2."""
    try:
        app()
    except AmpwatchError as error:
        typer.echo(f"ampwatch: {error}", err=True)
        sys.exit(2)
