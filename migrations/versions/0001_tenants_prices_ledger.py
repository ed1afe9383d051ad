"""Tenants and keys, routes and prices, and the ledger with its rollups."""

from __future__ import annotations

from datetime import UTC, datetime

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = """
CREATE TABLE tenants (
    id uuid PRIMARY KEY,
    name text NOT NULL UNIQUE,
    generation bigint NOT NULL DEFAULT 1,
    salt text NOT NULL,
    requests_per_minute integer CONSTRAINT tenants_requests_per_minute_check CHECK (requests_per_minute >= 0),
    max_concurrent integer CONSTRAINT tenants_max_concurrent_check CHECK (max_concurrent >= 0),
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE budgets (
    tenant_id uuid PRIMARY KEY REFERENCES tenants (id),
    amount_nano_usd bigint NOT NULL
        CONSTRAINT budgets_amount_nano_usd_check CHECK (amount_nano_usd BETWEEN 0 AND 9007199254740991),
    period text NOT NULL CONSTRAINT budgets_period_check CHECK (period IN ('day', 'week', 'month', 'total')),
    timezone text NOT NULL
);

CREATE TABLE api_keys (
    public_id text PRIMARY KEY,
    tenant_id uuid REFERENCES tenants (id),
    name text NOT NULL,
    secret_sha256 bytea NOT NULL
        CONSTRAINT api_keys_secret_sha256_check CHECK (octet_length(secret_sha256) = 32),
    scopes text[] NOT NULL,
    allowed_models text[],
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    CONSTRAINT api_keys_admin_has_no_tenant_check CHECK ((tenant_id IS NULL) = ('admin' = ANY (scopes)))
);
CREATE INDEX api_keys_tenant_id_idx ON api_keys (tenant_id);

CREATE TABLE pools (
    name text PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE routes (
    name text PRIMARY KEY,
    pool text NOT NULL REFERENCES pools (name),
    backend_model text NOT NULL,
    context_length integer NOT NULL CONSTRAINT routes_context_length_check CHECK (context_length > 0),
    default_output_tokens integer NOT NULL,
    max_output_tokens integer NOT NULL,
    timeout_s double precision NOT NULL CONSTRAINT routes_timeout_s_check CHECK (timeout_s > 0),
    unpriced text NOT NULL DEFAULT 'refuse' CONSTRAINT routes_unpriced_check CHECK (unpriced IN ('refuse', 'serve')),
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT routes_default_output_tokens_check CHECK (default_output_tokens BETWEEN 1 AND max_output_tokens)
);

CREATE TABLE prices (
    id uuid PRIMARY KEY,
    route text NOT NULL REFERENCES routes (name),
    input_usd_per_mtok numeric(18, 9) NOT NULL
        CONSTRAINT prices_input_usd_per_mtok_check CHECK (input_usd_per_mtok >= 0),
    output_usd_per_mtok numeric(18, 9) NOT NULL
        CONSTRAINT prices_output_usd_per_mtok_check CHECK (output_usd_per_mtok >= 0),
    effective_from timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (route, effective_from)
);

CREATE TABLE usage_events (
    request_id uuid NOT NULL,
    admitted_at timestamptz NOT NULL,
    revision integer NOT NULL,
    tenant_id uuid NOT NULL,
    key_id text NOT NULL,
    route text NOT NULL,
    status text NOT NULL
        CONSTRAINT usage_events_status_check CHECK (status IN ('ok', 'aborted', 'failed', 'abandoned')),
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    usage_source text NOT NULL,
    charged_nano_usd bigint NOT NULL,
    cost_nano_usd bigint NOT NULL,
    price_id uuid,
    over_bound boolean NOT NULL,
    streamed boolean NOT NULL,
    backend text,
    attempts integer NOT NULL,
    error_code text,
    client_request_id text,
    first_token_ms bigint,
    total_ms bigint,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (request_id, admitted_at),
    CONSTRAINT usage_events_amounts_check CHECK (charged_nano_usd >= 0 AND cost_nano_usd >= 0),
    CONSTRAINT usage_events_tokens_check
        CHECK (prompt_tokens >= 0 AND completion_tokens >= 0 AND cached_tokens >= 0)
) PARTITION BY RANGE (admitted_at);
CREATE INDEX usage_events_tenant_id_admitted_at_idx ON usage_events (tenant_id, admitted_at);

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

CREATE TABLE refusals (
    bucket timestamptz NOT NULL,
    tenant_id uuid NOT NULL,
    key_id text NOT NULL,
    reason text NOT NULL,
    count bigint NOT NULL,
    PRIMARY KEY (bucket, tenant_id, key_id, reason)
);

CREATE TABLE refusal_batches (
    id uuid PRIMARY KEY,
    recorded_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE dead_usage_events (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shard text NOT NULL,
    entry_id text NOT NULL,
    raw bytea NOT NULL,
    error text NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (shard, entry_id)
);
"""


def upgrade() -> None:
    for statement in STATEMENTS.split(";\n"):
        if statement.strip():
            op.execute(statement)
    # This month and the next two; the drainer makes the later ones.
    now = datetime.now(UTC)
    for offset in range(3):
        first, last = (now.year * 12 + now.month - 1 + offset + step for step in (0, 1))
        begin, end = (datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC) for month in (first, last))
        op.execute(
            f"CREATE TABLE usage_events_{begin:%Y_%m} PARTITION OF usage_events "
            f"FOR VALUES FROM ('{begin.isoformat()}') TO ('{end.isoformat()}')"
        )


def downgrade() -> None:
    for table in (
        "dead_usage_events",
        "refusal_batches",
        "refusals",
        "usage_rollup",
        "usage_events",
        "prices",
        "routes",
        "pools",
        "api_keys",
        "budgets",
        "tenants",
    ):
        op.execute(f"DROP TABLE {table}")
