"""Marks on findings, the outbox of alerts, and when a token was used last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0001"

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add two tables and a column."""
    op.create_table(
        "finding_marks",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("mark", sa.Text(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "key"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("due", sa.Float(precision=53), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("outbox_once", "outbox", ["run", "key", "destination"], unique=True)
    op.create_index("outbox_by_due", "outbox", ["due"])
    op.add_column("tokens", sa.Column("last_used", sa.Float(precision=53), nullable=True))
