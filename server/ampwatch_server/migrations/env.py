"""How Alembic reaches the database: on the connection that `Database.migrate` hands over."""

from __future__ import annotations

from alembic import context
from sqlalchemy.engine import Connection

from ampwatch_server.tables import metadata

_LOCK = 0x616D7077  # "ampw": one server migrates, the others wait


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        context.run_migrations()


_migrate(context.config.attributes["connection"])
