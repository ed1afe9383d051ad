"""The tenants' data keys."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

UPGRADE = """
CREATE TABLE data_keys (
    id uuid PRIMARY KEY,
    tenant_id uuid NOT NULL REFERENCES tenants (id),
    end_user text NOT NULL DEFAULT '',
    wrapped bytea NOT NULL,
    master_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT data_keys_tenant_id_end_user_key UNIQUE (tenant_id, end_user)
);
CREATE INDEX data_keys_master_id_idx ON data_keys (master_id);
"""

# Tenants read what the keys open, never the keys.
ROW_SECURITY = "ALTER TABLE data_keys ENABLE ROW LEVEL SECURITY"


def upgrade() -> None:
    run = op.get_bind().exec_driver_sql
    run(UPGRADE)
    run(ROW_SECURITY)


def downgrade() -> None:
    # With the keys, all that they sealed is lost.
    op.get_bind().exec_driver_sql("DROP TABLE data_keys")
