"""`ampwatch token`: who may send to a server and read from it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._extra import needs
from ._json import as_json

if TYPE_CHECKING:
    from ampwatch_server.token_book import TokenBook

token_app = typer.Typer(
    name="token",
    no_args_is_help=True,
    help="Create, list and revoke the tokens of a server, in its database.",
)

Database = Annotated[str | None, typer.Option(help="SQLAlchemy URL of the server's store.")]
Directory = Annotated[Path | None, typer.Option("--dir", help="The folder that `ampwatch serve DIR` shows.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@token_app.command()
def create(
    name: Annotated[str, typer.Argument(help="What it is for, such as the name of a cluster.")],
    scope: Annotated[list[str] | None, typer.Option(help="read, write or admin; may be repeated.")] = None,
    project: Annotated[str | None, typer.Option(help="For the runs of this project only.")] = None,
    database: Database = None,
    directory: Directory = None,
    json_: Json = False,
) -> None:
    """Make a token and print it, this once. Training jobs need the scope write."""
    scopes = scope or ["write"]
    with _book(database, directory, make=True) as book:
        value = book.create(name, scopes, project)
    typer.echo(f"ampwatch: a token for the server on {book.database}", err=True)
    made = {"token": value, "name": name, "scopes": scopes, "project": project}
    typer.echo(as_json(made) if json_ else value)


@token_app.command("list")
def list_(database: Database = None, directory: Directory = None, json_: Json = False) -> None:
    """List the tokens. Their values are not known any more."""
    with _book(database, directory) as book:
        rows = book.list()
    if json_:
        typer.echo(as_json({"tokens": rows}))
        return
    if not rows:
        typer.echo("No tokens.")
    for row in rows:
        made = datetime.fromtimestamp(row["created"], timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        typer.echo(f"{row['id']:>4}  {','.join(row['scopes']):<16}  {made}  {row['name']}{_of(row)}")


def _of(row: dict[str, Any]) -> str:
    return "" if row["project"] is None else f", project {row['project']}"


@token_app.command()
def revoke(
    token: Annotated[int, typer.Argument(help="Id of the token, as `ampwatch token list` shows it.")],
    database: Database = None,
    directory: Directory = None,
) -> None:
    """Revoke a token; running servers refuse it within seconds."""
    with _book(database, directory) as book:
        name = book.revoke(token)
    typer.echo(f"Revoked token {token}, {name}.")


def _book(
    database: str | None, directory: Path | None, *, make: bool = False
) -> AbstractContextManager[TokenBook]:
    with needs("ampwatch token", "server"):
        from ampwatch_server.token_book import open_book
    return open_book(database, directory, make=make)
