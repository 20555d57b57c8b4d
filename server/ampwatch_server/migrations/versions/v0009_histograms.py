"""Histograms beside the other columns of a chunk, for those who do not read them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add a column to `chunks` and to `parts`.

    Where no older server shares the database (SQLite, or one without chunks) it is written from now on, else once a
    person says that they are gone (`ampwatch db upgrade --finish`).
    """
    for table in ("chunks", "parts"):
        op.add_column(table, sa.Column("hist", sa.LargeBinary()))
    connection = op.get_bind()
    is_alone = connection.dialect.name == "sqlite"
    if is_alone or connection.execute(sa.text("SELECT 1 FROM chunks LIMIT 1")).first() is None:
        op.execute("UPDATE formats SET version = 3 WHERE name = 'chunks' AND version < 3")
