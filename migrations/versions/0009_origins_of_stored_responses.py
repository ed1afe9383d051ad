"""Whose a stored response is, and what it was built upon, so that it can be erased with that."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

# Of rows that are there already nobody can tell: they are sealed. They stay NULL until they expire.
UPGRADE = "ALTER TABLE stored_responses ADD COLUMN end_users text[], ADD COLUMN built_upon text[]"
DOWNGRADE = "ALTER TABLE stored_responses DROP COLUMN end_users, DROP COLUMN built_upon"


def upgrade() -> None:
    op.get_bind().exec_driver_sql(UPGRADE)


def downgrade() -> None:
    op.get_bind().exec_driver_sql(DOWNGRADE)
