"""Indices of the audit: a job of a thousand hosts asks it a thousand times."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add two indices."""
    op.create_index("audit_by_use", "audit", ["action", "who", "subject", "time"])
    op.create_index("audit_by_time", "audit", ["action", "time"])
