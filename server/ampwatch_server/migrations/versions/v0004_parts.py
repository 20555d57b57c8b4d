"""Points of windows whose parent is not complete, and how far back the finest level reaches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table `parts`, and two columns to `producers`."""
    op.create_table(
        "parts",
        sa.Column("producer", ROW_ID, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("stream", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.SmallInteger(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("codec", sa.SmallInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["producer"], ["producers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("producer", "kind", "stream", "level", "first"),
    )
    for name in ("attempts_from", "tensors_from"):
        op.add_column("producers", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0"))
