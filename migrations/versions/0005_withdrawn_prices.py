"""A price that was withdrawn before it began leaves its place to another."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

UPGRADE = """
ALTER TABLE prices DROP CONSTRAINT prices_route_tenant_id_basis_effective_from_key;
CREATE UNIQUE INDEX prices_route_tenant_id_basis_effective_from_idx
    ON prices (route, tenant_id, basis, effective_from) NULLS NOT DISTINCT
    WHERE effective_until IS NULL OR effective_until > effective_from;
"""

DOWNGRADE = """
DROP INDEX prices_route_tenant_id_basis_effective_from_idx;
DELETE FROM prices WHERE effective_until = effective_from;
ALTER TABLE prices
    ADD CONSTRAINT prices_route_tenant_id_basis_effective_from_key
    UNIQUE NULLS NOT DISTINCT (route, tenant_id, basis, effective_from);
"""


def upgrade() -> None:
    op.get_bind().exec_driver_sql(UPGRADE)


def downgrade() -> None:
    op.get_bind().exec_driver_sql(DOWNGRADE)
