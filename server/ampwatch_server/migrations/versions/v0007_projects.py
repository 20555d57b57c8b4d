"""Tokens of one project, and the runs that they have sent."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add two columns."""
    op.add_column("tokens", sa.Column("project", sa.Text()))
    op.add_column("runs", sa.Column("bound", sa.Boolean(), nullable=False, server_default=sa.false()))
