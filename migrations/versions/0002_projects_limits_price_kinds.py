"""Projects, limits of every kind, kinds of prices and tokens, the audit log, alerts."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

NIL = "00000000-0000-0000-0000-000000000000"

UPGRADE = f"""
ALTER TABLE tenants
    ADD COLUMN timezone text NOT NULL DEFAULT 'UTC',
    ADD COLUMN redis_loss text NOT NULL DEFAULT 'fail_closed'
        CONSTRAINT tenants_redis_loss_check CHECK (redis_loss IN ('fail_closed', 'fail_open')),
    ADD COLUMN markup_bp integer NOT NULL DEFAULT 0
        CONSTRAINT tenants_markup_bp_check CHECK (markup_bp BETWEEN -10000 AND 1000000),
    ADD COLUMN weight double precision NOT NULL DEFAULT 1 CONSTRAINT tenants_weight_check CHECK (weight > 0),
    ADD COLUMN webhook_url text,
    ADD COLUMN webhook_secret bytea,
    ADD COLUMN archived_at timestamptz;

CREATE TABLE projects (
    id uuid PRIMARY KEY,
    tenant_id uuid NOT NULL REFERENCES tenants (id),
    name text NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    archived_at timestamptz,
    UNIQUE (tenant_id, name)
);
INSERT INTO projects (id, tenant_id, name) SELECT gen_random_uuid(), id, 'default' FROM tenants;

CREATE TABLE limits (
    id uuid PRIMARY KEY,
    tenant_id uuid NOT NULL REFERENCES tenants (id),
    subject text NOT NULL
        CONSTRAINT limits_subject_check CHECK (subject IN ('tenant', 'project', 'key', 'end_user', 'model')),
    target text NOT NULL DEFAULT '',
    metric text NOT NULL,
    "window" text NOT NULL,
    amount bigint NOT NULL CONSTRAINT limits_amount_check CHECK (amount BETWEEN 0 AND 9007199254740991),
    hard boolean NOT NULL DEFAULT true,
    thresholds integer[] NOT NULL DEFAULT '{{}}',
    version bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT limits_window_check CHECK (
        (metric IN ('requests', 'tokens') AND "window" IN ('minute', 'hour', 'day'))
        OR (metric = 'concurrent' AND "window" = '')
        OR (metric = 'budget' AND "window" IN ('day', 'week', 'month', 'total'))
    ),
    UNIQUE (tenant_id, subject, target, metric, "window")
);

ALTER TABLE api_keys
    ADD COLUMN project_id uuid REFERENCES projects (id),
    ADD COLUMN max_context_tokens integer,
    ADD COLUMN max_output_tokens integer,
    ADD COLUMN role text CONSTRAINT api_keys_role_check CHECK (role IN ('owner', 'admin', 'viewer')),
    ADD COLUMN previous_secret_sha256 bytea,
    ADD COLUMN previous_until timestamptz,
    ADD COLUMN version bigint NOT NULL DEFAULT 1,
    ADD CONSTRAINT api_keys_caps_check CHECK (max_context_tokens > 0 AND max_output_tokens > 0);
UPDATE api_keys SET project_id = projects.id FROM projects WHERE projects.tenant_id = api_keys.tenant_id;
UPDATE api_keys SET role = 'owner' WHERE tenant_id IS NULL;
ALTER TABLE api_keys
    ADD CONSTRAINT api_keys_project_check CHECK ((tenant_id IS NULL) = (project_id IS NULL)),
    ADD CONSTRAINT api_keys_role_of_admin_check CHECK ((tenant_id IS NULL) = (role IS NOT NULL));

ALTER TABLE routes
    ADD COLUMN tokenizer text,
    ADD COLUMN version bigint NOT NULL DEFAULT 1;

ALTER TABLE prices
    ADD COLUMN tenant_id uuid REFERENCES tenants (id),
    ADD COLUMN basis text NOT NULL DEFAULT 'charge'
        CONSTRAINT prices_basis_check CHECK (basis IN ('charge', 'cost')),
    ADD COLUMN cached_input_usd_per_mtok numeric(18, 9),
    ADD COLUMN cache_write_usd_per_mtok numeric(18, 9),
    ADD COLUMN reasoning_usd_per_mtok numeric(18, 9),
    ADD COLUMN usd_per_request numeric(18, 9),
    ADD COLUMN usd_per_image numeric(18, 9),
    ADD COLUMN compute_usd_per_hour numeric(18, 9),
    ADD COLUMN compute_ceiling_s double precision,
    ADD COLUMN source text,
    DROP CONSTRAINT prices_input_usd_per_mtok_check,
    DROP CONSTRAINT prices_output_usd_per_mtok_check,
    ADD CONSTRAINT prices_cost_of_all_check CHECK (basis = 'charge' OR tenant_id IS NULL),
    ADD CONSTRAINT prices_compute_ceiling_check
        CHECK ((compute_usd_per_hour IS NULL) = (compute_ceiling_s IS NULL)),
    ADD CONSTRAINT prices_rates_check CHECK (
        input_usd_per_mtok >= 0 AND output_usd_per_mtok >= 0 AND cached_input_usd_per_mtok >= 0
        AND cache_write_usd_per_mtok >= 0 AND reasoning_usd_per_mtok >= 0 AND usd_per_request >= 0
        AND usd_per_image >= 0 AND compute_usd_per_hour >= 0 AND compute_ceiling_s > 0
    ),
    DROP CONSTRAINT prices_route_effective_from_key,
    ADD CONSTRAINT prices_route_tenant_id_basis_effective_from_key
        UNIQUE NULLS NOT DISTINCT (route, tenant_id, basis, effective_from);

ALTER TABLE usage_events
    ADD COLUMN project_id uuid NOT NULL DEFAULT '{NIL}',
    ADD COLUMN end_user text,
    ADD COLUMN cache_write_tokens bigint NOT NULL DEFAULT 0,
    ADD COLUMN reasoning_tokens bigint NOT NULL DEFAULT 0,
    ADD COLUMN images bigint NOT NULL DEFAULT 0,
    ADD COLUMN compute_us bigint NOT NULL DEFAULT 0,
    ADD COLUMN cost_price_id uuid,
    ADD COLUMN markup_bp integer NOT NULL DEFAULT 0,
    ADD COLUMN queue_ms bigint,
    ADD COLUMN tags text[] NOT NULL DEFAULT '{{}}',
    ADD CONSTRAINT usage_events_kinds_check
        CHECK (cache_write_tokens >= 0 AND reasoning_tokens >= 0 AND images >= 0 AND compute_us >= 0),
    DROP CONSTRAINT usage_events_status_check,
    ADD CONSTRAINT usage_events_status_check
        CHECK (status IN ('ok', 'aborted', 'failed', 'abandoned', 'cache_hit', 'replayed'));
UPDATE usage_events SET project_id = projects.id FROM projects WHERE projects.tenant_id = usage_events.tenant_id;
ALTER TABLE usage_events ALTER COLUMN project_id DROP DEFAULT;
CREATE INDEX usage_events_tenant_id_end_user_admitted_at_idx ON usage_events (tenant_id, end_user, admitted_at)
    WHERE end_user IS NOT NULL;

DROP TABLE usage_rollup;
CREATE TABLE usage_rollup (
    bucket timestamptz NOT NULL,
    tenant_id uuid NOT NULL,
    project_id uuid NOT NULL,
    key_id text NOT NULL,
    route text NOT NULL,
    backend text NOT NULL,
    status text NOT NULL,
    requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    cache_write_tokens bigint NOT NULL,
    reasoning_tokens bigint NOT NULL,
    images bigint NOT NULL,
    compute_us bigint NOT NULL,
    charged_nano_usd numeric(38, 0) NOT NULL,
    cost_nano_usd numeric(38, 0) NOT NULL,
    PRIMARY KEY (bucket, tenant_id, project_id, key_id, route, backend, status)
);
CREATE INDEX usage_rollup_tenant_id_bucket_idx ON usage_rollup (tenant_id, bucket);
INSERT INTO usage_rollup
    SELECT date_bin('15 minutes', admitted_at, '2000-01-01 00:00+00'), tenant_id, project_id, key_id, route,
        coalesce(backend, ''), status, count(*), sum(prompt_tokens), sum(completion_tokens), sum(cached_tokens),
        0, 0, 0, 0, sum(charged_nano_usd), sum(cost_nano_usd)
    FROM usage_events GROUP BY 1, 2, 3, 4, 5, 6, 7;

CREATE TABLE audit_log (
    id uuid PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    actor text NOT NULL,
    action text NOT NULL,
    kind text NOT NULL,
    target text NOT NULL,
    tenant_id uuid,
    before jsonb,
    after jsonb
);
CREATE INDEX audit_log_tenant_id_id_idx ON audit_log (tenant_id, id);
CREATE FUNCTION refuse_change_of_audit_log() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$;
CREATE TRIGGER audit_log_is_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change_of_audit_log();

CREATE TABLE alerts (
    id uuid PRIMARY KEY,
    tenant_id uuid NOT NULL REFERENCES tenants (id),
    limit_id uuid NOT NULL,
    period_start timestamptz NOT NULL,
    threshold integer NOT NULL,
    spent_nano_usd bigint NOT NULL,
    amount_nano_usd bigint NOT NULL,
    subject text NOT NULL,
    target text NOT NULL,
    "window" text NOT NULL,
    crossed_at timestamptz NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    delivered_at timestamptz,
    given_up_at timestamptz,
    last_error text,
    UNIQUE (limit_id, target, period_start, threshold)
);
"""


DOWNGRADE = """
DROP TABLE alerts;
DROP TABLE audit_log;
DROP FUNCTION refuse_change_of_audit_log();
DROP TABLE limits;
DROP INDEX usage_events_tenant_id_end_user_admitted_at_idx;
DELETE FROM usage_events WHERE status IN ('cache_hit', 'replayed');
ALTER TABLE usage_events
    DROP CONSTRAINT usage_events_status_check,
    ADD CONSTRAINT usage_events_status_check CHECK (status IN ('ok', 'aborted', 'failed', 'abandoned')),
    DROP COLUMN project_id, DROP COLUMN end_user, DROP COLUMN cache_write_tokens, DROP COLUMN reasoning_tokens,
    DROP COLUMN images, DROP COLUMN compute_us, DROP COLUMN cost_price_id, DROP COLUMN markup_bp,
    DROP COLUMN queue_ms, DROP COLUMN tags;
DROP TABLE usage_rollup;
CREATE TABLE usage_rollup (
    bucket timestamptz NOT NULL,
    tenant_id uuid NOT NULL,
    key_id text NOT NULL,
    route text NOT NULL,
    status text NOT NULL,
    requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    charged_nano_usd numeric(38, 0) NOT NULL,
    cost_nano_usd numeric(38, 0) NOT NULL,
    PRIMARY KEY (bucket, tenant_id, key_id, route, status)
);
CREATE INDEX usage_rollup_tenant_id_bucket_idx ON usage_rollup (tenant_id, bucket);
INSERT INTO usage_rollup
    SELECT date_bin('15 minutes', admitted_at, '2000-01-01 00:00+00'), tenant_id, key_id, route, status, count(*),
        sum(prompt_tokens), sum(completion_tokens), sum(cached_tokens), sum(charged_nano_usd), sum(cost_nano_usd)
    FROM usage_events GROUP BY 1, 2, 3, 4, 5;
DELETE FROM prices WHERE tenant_id IS NOT NULL OR basis = 'cost';
ALTER TABLE prices
    DROP CONSTRAINT prices_rates_check,
    DROP CONSTRAINT prices_route_tenant_id_basis_effective_from_key,
    DROP COLUMN tenant_id, DROP COLUMN basis, DROP COLUMN cached_input_usd_per_mtok,
    DROP COLUMN cache_write_usd_per_mtok, DROP COLUMN reasoning_usd_per_mtok, DROP COLUMN usd_per_request,
    DROP COLUMN usd_per_image, DROP COLUMN compute_usd_per_hour, DROP COLUMN compute_ceiling_s, DROP COLUMN source,
    ADD CONSTRAINT prices_input_usd_per_mtok_check CHECK (input_usd_per_mtok >= 0),
    ADD CONSTRAINT prices_output_usd_per_mtok_check CHECK (output_usd_per_mtok >= 0),
    ADD CONSTRAINT prices_route_effective_from_key UNIQUE (route, effective_from);
ALTER TABLE routes DROP COLUMN tokenizer, DROP COLUMN version;
ALTER TABLE api_keys
    DROP COLUMN project_id, DROP COLUMN max_context_tokens, DROP COLUMN max_output_tokens, DROP COLUMN role,
    DROP COLUMN previous_secret_sha256, DROP COLUMN previous_until, DROP COLUMN version;
DROP TABLE projects;
ALTER TABLE tenants
    DROP COLUMN timezone, DROP COLUMN redis_loss, DROP COLUMN markup_bp, DROP COLUMN weight, DROP COLUMN webhook_url,
    DROP COLUMN webhook_secret, DROP COLUMN archived_at;
"""


def upgrade() -> None:
    # One string: psycopg sends a script without parameters as it is, with its functions' own semicolons.
    op.get_bind().exec_driver_sql(UPGRADE)


def downgrade() -> None:
    # The kinds of tokens and prices are lost, and with them what only they explain.
    op.get_bind().exec_driver_sql(DOWNGRADE)
