"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Create every table."""
    op.create_table(
        "audit",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "runs",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("project", sa.Text(), nullable=False),
        sa.Column("given_name", sa.Text(), nullable=False),
        sa.Column("given_tags", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("tags", sa.Text(), nullable=True),
        sa.Column("notes", sa.Text(), nullable=False),
        sa.Column("archived", sa.Boolean(), nullable=False),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("started", sa.Float(precision=53), nullable=False),
        sa.Column("last_seen", sa.Float(precision=53), nullable=False),
        sa.Column("last_attempt", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("run"),
    )
    op.create_index("runs_by_last_seen", "runs", ["last_seen", "run"])
    op.create_table(
        "tokens",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(precision=53), nullable=False),
        sa.Column("expires", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash"),
    )
    op.create_table(
        "findings",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "key"),
    )
    op.create_table(
        "producers",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("producer", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("first_seen", sa.Float(precision=53), nullable=False),
        sa.Column("last_seen", sa.Float(precision=53), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), nullable=False),
        sa.Column("received", sa.BigInteger(), nullable=False),
        sa.Column("end_attempt", sa.BigInteger(), nullable=False),
        sa.Column("rolled", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("skipped", sa.BigInteger(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("announced", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("producer"),
    )
    op.create_index("ix_producers_run", "producers", ["run"])
    op.create_table(
        "run_state",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("lease_until", sa.Float(precision=53), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("changed", sa.Float(precision=53), nullable=False),
        sa.Column("summary", sa.LargeBinary(), nullable=False),
        sa.Column("verdict", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run"),
    )
    op.create_index("run_state_by_changed", "run_state", ["changed"])
    op.create_table(
        "chunks",
        sa.Column("producer", ROW_ID, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("stream", sa.BigInteger(), nullable=False),
        sa.Column("level", sa.SmallInteger(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("codec", sa.SmallInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["producer"], ["producers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("producer", "kind", "stream", "level", "first"),
    )
    op.create_table(
        "events",
        sa.Column("id", ROW_ID, nullable=False),
        sa.Column("producer", ROW_ID, nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("time", sa.Float(precision=53), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["producer"], ["producers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("events_by_time", "events", ["run", "time", "id"])
    op.create_index("events_by_type", "events", ["run", "type", "time", "id"])
    op.create_index("events_once", "events", ["producer", "seq", "place"], unique=True)
    op.create_table(
        "inbox",
        sa.Column("producer", ROW_ID, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("folded", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["producer"], ["producers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("producer", "seq"),
    )
    op.create_index("ix_inbox_run", "inbox", ["run"])
    op.create_table(
        "receipts",
        sa.Column("producer", ROW_ID, nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["producer"], ["producers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("producer", "seq"),
    )
    op.create_table(
        "tensors",
        sa.Column("producer", ROW_ID, nullable=False),
        sa.Column("tensor", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["producer"], ["producers.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("producer", "tensor"),
    )
