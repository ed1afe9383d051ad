"""Prices may end, and outlive their route; a dead event keeps its revision."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

UPGRADE = """
ALTER TABLE prices
    DROP CONSTRAINT prices_route_fkey,
    ADD COLUMN effective_until timestamptz,
    ADD CONSTRAINT prices_effective_until_check CHECK (effective_until >= effective_from);
ALTER TABLE dead_usage_events ADD COLUMN revision integer;
"""

DOWNGRADE = """
ALTER TABLE dead_usage_events DROP COLUMN revision;
DELETE FROM prices WHERE effective_until = effective_from OR route NOT IN (SELECT name FROM routes);
ALTER TABLE prices
    DROP COLUMN effective_until,
    ADD CONSTRAINT prices_route_fkey FOREIGN KEY (route) REFERENCES routes (name);
"""


def upgrade() -> None:
    op.get_bind().exec_driver_sql(UPGRADE)


def downgrade() -> None:
    # Prices of routes that are gone are lost, and the ends of others: end them anew after going up again.
    op.get_bind().exec_driver_sql(DOWNGRADE)
