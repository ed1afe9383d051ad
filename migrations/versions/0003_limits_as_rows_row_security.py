"""Limits as rows in place of columns, versions of tenants, and row-level security for reads on a tenant's behalf."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

LIMITS = """
ALTER TABLE tenants ADD COLUMN version bigint NOT NULL DEFAULT 1;
UPDATE tenants SET timezone = budgets.timezone FROM budgets WHERE budgets.tenant_id = tenants.id;
INSERT INTO limits (id, tenant_id, subject, metric, "window", amount)
    SELECT gen_random_uuid(), id, 'tenant', 'requests', 'minute', requests_per_minute
        FROM tenants WHERE requests_per_minute IS NOT NULL
    UNION ALL
    SELECT gen_random_uuid(), id, 'tenant', 'concurrent', '', max_concurrent
        FROM tenants WHERE max_concurrent IS NOT NULL
    UNION ALL
    SELECT gen_random_uuid(), tenant_id, 'tenant', 'budget', period, amount_nano_usd FROM budgets;
DROP TABLE budgets;
ALTER TABLE tenants DROP COLUMN requests_per_minute, DROP COLUMN max_concurrent;
"""

# Roles belong to the whole server: another database's migration may have made this one, or be making it just now.
ROLE = """
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'penstock_tenant') THEN
        BEGIN
            CREATE ROLE penstock_tenant NOLOGIN;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN
                RAISE EXCEPTION USING MESSAGE = 'ask for: CREATE ROLE penstock_tenant NOLOGIN; '
                    'GRANT penstock_tenant TO ' || quote_ident(current_user);
        END;
    END IF;
    FOR attempt IN 1..10 LOOP
        -- Tried, not looked up: since Postgres 16 whoever makes a role is a member of it that may not act as it.
        BEGIN
            SET LOCAL ROLE penstock_tenant;
            RESET ROLE;
            EXIT;
        EXCEPTION WHEN insufficient_privilege THEN NULL;
        END;
        BEGIN
            EXECUTE 'GRANT penstock_tenant TO ' || quote_ident(current_user);
        EXCEPTION
            WHEN insufficient_privilege THEN
                RAISE EXCEPTION USING MESSAGE = 'ask for: GRANT penstock_tenant TO ' || quote_ident(current_user);
            -- "tuple concurrently updated" is an internal error.
            WHEN unique_violation OR internal_error THEN PERFORM pg_sleep(0.05);
        END;
    END LOOP;
END $$;
"""

ME = "nullif(current_setting('penstock.tenant_id', true), '')::uuid"
# What a tenant's own reads may see of each table, and whose rows. Neither salts nor secrets nor their hashes; of
# audit_log nothing. Partitions of usage_events are granted to nobody: a tenant's reads go through the table itself.
READABLE = {
    "tenants": (
        "id, name, generation, created_at, timezone, redis_loss, markup_bp, weight, webhook_url, archived_at, version",
        f"id = {ME}",
    ),
    "api_keys": (
        "public_id, tenant_id, name, scopes, allowed_models, created_at, expires_at, revoked_at, project_id, "
        "max_context_tokens, max_output_tokens, previous_until, version",
        f"tenant_id = {ME}",
    ),
    # What tenants pay; what it costs us is ours alone.
    "prices": (None, f"basis = 'charge' AND (tenant_id IS NULL OR tenant_id = {ME})"),
    **{
        table: (None, f"tenant_id = {ME}")
        for table in ("projects", "limits", "usage_events", "usage_rollup", "refusals", "alerts")
    },
}

UNLIMITED = """
CREATE TABLE budgets (
    tenant_id uuid PRIMARY KEY REFERENCES tenants (id),
    amount_nano_usd bigint NOT NULL
        CONSTRAINT budgets_amount_nano_usd_check CHECK (amount_nano_usd BETWEEN 0 AND 9007199254740991),
    period text NOT NULL CONSTRAINT budgets_period_check CHECK (period IN ('day', 'week', 'month', 'total')),
    timezone text NOT NULL
);
INSERT INTO budgets SELECT DISTINCT ON (tenant_id) tenant_id, amount, "window", timezone
    FROM limits JOIN tenants ON tenants.id = tenant_id
    WHERE subject = 'tenant' AND metric = 'budget' AND hard ORDER BY tenant_id, amount;
ALTER TABLE tenants
    ADD COLUMN requests_per_minute integer
        CONSTRAINT tenants_requests_per_minute_check CHECK (requests_per_minute >= 0),
    ADD COLUMN max_concurrent integer CONSTRAINT tenants_max_concurrent_check CHECK (max_concurrent >= 0),
    DROP COLUMN version;
UPDATE tenants SET requests_per_minute = amount FROM limits
    WHERE tenant_id = tenants.id AND subject = 'tenant' AND metric = 'requests' AND "window" = 'minute' AND hard;
UPDATE tenants SET max_concurrent = amount FROM limits
    WHERE tenant_id = tenants.id AND subject = 'tenant' AND metric = 'concurrent' AND hard;
DELETE FROM limits;
"""


def upgrade() -> None:
    run = op.get_bind().exec_driver_sql
    run(LIMITS)
    run(ROLE)
    # Whoever reads on a tenant's behalf must find the tables.
    for table, (columns, condition) in READABLE.items():
        run(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        run(f"CREATE POLICY tenant_isolation ON {table} FOR SELECT TO penstock_tenant USING ({condition})")
        run(f"GRANT SELECT {f'({columns}) ' if columns else ''}ON {table} TO penstock_tenant")
    run("ALTER TABLE audit_log ENABLE ROW LEVEL SECURITY")


def downgrade() -> None:
    # Only the tenants' own limits per minute, of concurrency and of money had a place before. The role stays: other
    # databases of the server may use it.
    run = op.get_bind().exec_driver_sql
    run("ALTER TABLE audit_log DISABLE ROW LEVEL SECURITY")
    for table in READABLE:
        run(f"REVOKE ALL ON {table} FROM penstock_tenant")
        run(f"DROP POLICY tenant_isolation ON {table}")
        run(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    run(UNLIMITED)
