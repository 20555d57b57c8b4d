"""Alembic migrations: steps that only add, so that an older server goes on during a roll-out."""
