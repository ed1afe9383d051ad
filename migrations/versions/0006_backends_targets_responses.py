"""Backends as rows, routes with several targets, stored responses, and what each request's attempts came to."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

UPGRADE = """
ALTER TABLE routes
    ADD COLUMN weight double precision NOT NULL DEFAULT 1
        CONSTRAINT routes_weight_check CHECK (weight >= 0),
    ADD COLUMN priority integer NOT NULL DEFAULT 0;
CREATE TABLE route_targets (
    route text NOT NULL REFERENCES routes (name) ON DELETE CASCADE,
    position integer NOT NULL,
    pool text NOT NULL REFERENCES pools (name),
    backend_model text NOT NULL,
    weight double precision NOT NULL CONSTRAINT route_targets_weight_check CHECK (weight >= 0),
    priority integer NOT NULL,
    PRIMARY KEY (route, position)
);
CREATE INDEX route_targets_pool_idx ON route_targets (pool);
CREATE TABLE backends (
    name text PRIMARY KEY,
    pool text NOT NULL REFERENCES pools (name),
    brand text NOT NULL,
    base_url text NOT NULL,
    api_key bytea,
    headers bytea,
    header_names text[] NOT NULL DEFAULT '{}',
    model text,
    context_length integer NOT NULL CONSTRAINT backends_context_length_check CHECK (context_length > 0),
    weight double precision NOT NULL DEFAULT 1 CONSTRAINT backends_weight_check CHECK (weight >= 0),
    priority integer NOT NULL DEFAULT 0,
    connect_timeout_s double precision,
    first_byte_timeout_s double precision,
    idle_timeout_s double precision,
    enabled boolean NOT NULL DEFAULT true,
    version bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT backends_timeouts_check CHECK (
        connect_timeout_s > 0 AND first_byte_timeout_s > 0 AND idle_timeout_s > 0
    )
);
CREATE INDEX backends_pool_idx ON backends (pool);
CREATE TABLE stored_responses (
    tenant_id uuid NOT NULL REFERENCES tenants (id),
    id text NOT NULL,
    project_id uuid NOT NULL,
    sealed bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, id)
);
CREATE INDEX stored_responses_expires_at_idx ON stored_responses (expires_at);
ALTER TABLE usage_events
    ADD COLUMN api text NOT NULL DEFAULT 'chat_completions',
    ADD COLUMN failed_attempts text[] NOT NULL DEFAULT '{}';
"""

ROW_SECURITY = """
ALTER TABLE stored_responses ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant_isolation ON stored_responses FOR SELECT TO penstock_tenant
    USING (tenant_id = nullif(current_setting('penstock.tenant_id', true), '')::uuid);
GRANT SELECT ON stored_responses TO penstock_tenant;
"""

DOWNGRADE = """
ALTER TABLE usage_events DROP COLUMN api, DROP COLUMN failed_attempts;
DROP TABLE stored_responses;
DROP TABLE backends;
DROP TABLE route_targets;
ALTER TABLE routes DROP COLUMN weight, DROP COLUMN priority;
"""


def upgrade() -> None:
    run = op.get_bind().exec_driver_sql
    run(UPGRADE)
    run(ROW_SECURITY)


def downgrade() -> None:
    # What had no place before is lost: backends, further targets, stored responses.
    op.get_bind().exec_driver_sql(DOWNGRADE)
