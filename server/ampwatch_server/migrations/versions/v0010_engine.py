"""Which engine judged a run, and at which revision of the run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add two columns. Of all runs that were judged before it is unknown by which engine: each is judged anew."""
    op.add_column("run_state", sa.Column("engine", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("run_state", sa.Column("judged", sa.BigInteger(), nullable=False, server_default="-1"))
