"""The usual time between attempts, when a run was last received, where repeated events end, and what may be written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add three columns and a table.

    Where several servers may share the database, and those before read the first codec only, it stays the one that is
    written until a person says that they are gone (`ampwatch db upgrade --finish`).
    """
    op.add_column(
        "run_state", sa.Column("attempt_s", sa.Float(precision=53), nullable=False, server_default="0")
    )
    op.add_column("runs", sa.Column("received", sa.Float(precision=53)))
    op.add_column("events", sa.Column("last", sa.BigInteger()))
    formats = op.create_table(
        "formats",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    connection = op.get_bind()
    known = sa.text("SELECT codec FROM chunks ORDER BY codec DESC LIMIT 1")
    newest = None if connection.dialect.name == "sqlite" else connection.execute(known).scalar()
    op.bulk_insert(formats, [{"name": "chunks", "version": newest or 2}])
