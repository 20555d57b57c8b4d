"""`ampwatch db`: the database of a server, whether it runs or not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._extra import needs
from ._json import as_json
from ._keep import AttemptsDays, MaxGib, TensorsDays, keep_of

if TYPE_CHECKING:
    from ampwatch_server.settings import Settings

db_app = typer.Typer(
    name="db",
    no_args_is_help=True,
    help="Upgrade, prune or copy the database of a server, also while it runs.",
)

Database = Annotated[str | None, typer.Option(help="SQLAlchemy URL of the server's store.")]
Directory = Annotated[Path | None, typer.Option("--dir", help="The folder that `ampwatch serve DIR` shows.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@db_app.command()
def upgrade(
    database: Database = None,
    directory: Directory = None,
    finish: Annotated[bool, typer.Option("--finish", help="No older server uses it any more.")] = False,
) -> None:
    """Bring the schema up to this version. A server does that itself where the database is below 1 GB.

    Where servers of several versions share a database, it is written as the oldest can read it, until --finish.
    """
    settings = _settings(database, directory)
    from ampwatch_server.maintenance import opened

    with opened(settings, migrate=False) as store:
        store.migrate(largest_bytes=None)
        if finish:
            store.finish_upgrade()
    typer.echo(f"ampwatch: {_shown(settings)} is up to date")


@db_app.command()
def prune(
    database: Database = None,
    directory: Directory = None,
    tensors_days: TensorsDays = None,
    attempts_days: AttemptsDays = None,
    max_gib: MaxGib = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be dropped.")] = False,
    json_: Json = False,
) -> None:
    """Drop what is older than is kept, as a server does once an hour, and make the file smaller."""
    settings = _settings(database, directory)
    from ampwatch_server.maintenance import opened
    from ampwatch_server.retention import Retention, told

    keep = keep_of(tensors_days, attempts_days, max_gib)
    with opened(settings) as store:
        retention = Retention(store, replace(settings, keep=keep))
        drops = retention.due() if dry_run else retention.prune()
    if json_:
        typer.echo(as_json({"dropped": [drop._asdict() for drop in drops], "dry_run": dry_run}))
        return
    typer.echo(f"ampwatch: {_shown(settings)}: {told(keep)}", err=True)
    for drop in drops:
        what = "the whole run" if drop.what == "run" else f"rows of {drop.what}"
        typer.echo(f"{drop.run}  {what}, by {drop.why}")
    typer.echo(f"{len(drops)} {'would be dropped' if dry_run else 'dropped'}.")


@db_app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The copy to make; a file that is not there yet.")],
    database: Database = None,
    directory: Directory = None,
) -> None:
    """Copy the database as it is now, while servers use it. Of PostgreSQL by its own pg_dump."""
    settings = _settings(database, directory)
    from ampwatch_server.backup import backup as copy

    with typer.progressbar(length=1000, label=f"{file}", file=sys.stderr) as bar:
        copy(settings.url, file, lambda done, total: bar.update(1000 * done // max(1, total) - bar.pos))
    typer.echo(f"ampwatch: {_shown(settings)} is copied to {file}", err=True)


def _settings(database: str | None, directory: Path | None) -> Settings:
    with needs("ampwatch db", "server"):
        from ampwatch_server.settings import Settings, default_database
    return Settings(database=database or default_database(directory))


def _shown(settings: Settings) -> str:
    return settings.url.render_as_string(hide_password=True)
