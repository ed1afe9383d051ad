"""The tables, as SQLAlchemy Core. The migrations make them; a test holds that both agree.

Money is integer nano-USD (``*_nano_usd``), except prices, which are exact decimals in USD per million tokens. Times are
``timestamptz``. What is charged below is bounded by 2^53, because Redis counts in doubles.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "pk": "%(table_name)s_pkey",
    }
)


def _timestamp(name: str, *, nullable: bool = False, default: str | None = None) -> Column[Any]:
    server_default = text(default) if default else None
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=server_default)


tenants = Table(
    "tenants",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    # Counts changes to the tenant's configuration and keys; admission compares it with the one in Redis.
    Column("generation", BigInteger, nullable=False, server_default=text("1")),
    Column("salt", Text, nullable=False),
    Column("requests_per_minute", Integer),
    Column("max_concurrent", Integer),
    _timestamp("created_at", default="now()"),
    CheckConstraint("requests_per_minute >= 0", name="requests_per_minute"),
    CheckConstraint("max_concurrent >= 0", name="max_concurrent"),
)

budgets = Table(
    "budgets",
    metadata,
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("amount_nano_usd", BigInteger, nullable=False),
    Column("period", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    CheckConstraint("amount_nano_usd BETWEEN 0 AND 9007199254740991", name="amount_nano_usd"),
    CheckConstraint("period IN ('day', 'week', 'month', 'total')", name="period"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("public_id", Text, primary_key=True),
    # NULL: an admin's key, of no tenant.
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), index=True),
    Column("name", Text, nullable=False),
    Column("secret_sha256", LargeBinary, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    # NULL: every route.
    Column("allowed_models", ARRAY(Text)),
    _timestamp("created_at", default="now()"),
    _timestamp("expires_at", nullable=True),
    _timestamp("revoked_at", nullable=True),
    CheckConstraint("octet_length(secret_sha256) = 32", name="secret_sha256"),
    CheckConstraint("(tenant_id IS NULL) = ('admin' = ANY (scopes))", name="admin_has_no_tenant"),
)

pools = Table(
    "pools",
    metadata,
    Column("name", Text, primary_key=True),
    _timestamp("created_at", default="now()"),
)

routes = Table(
    "routes",
    metadata,
    Column("name", Text, primary_key=True),
    Column("pool", Text, ForeignKey("pools.name"), nullable=False),
    Column("backend_model", Text, nullable=False),
    Column("context_length", Integer, nullable=False),
    Column("default_output_tokens", Integer, nullable=False),
    Column("max_output_tokens", Integer, nullable=False),
    Column("timeout_s", Double, nullable=False),
    # What happens to a request while no price is in force.
    Column("unpriced", Text, nullable=False, server_default=text("'refuse'")),
    _timestamp("created_at", default="now()"),
    CheckConstraint("context_length > 0", name="context_length"),
    CheckConstraint("default_output_tokens BETWEEN 1 AND max_output_tokens", name="default_output_tokens"),
    CheckConstraint("timeout_s > 0", name="timeout_s"),
    CheckConstraint("unpriced IN ('refuse', 'serve')", name="unpriced"),
)

prices = Table(
    "prices",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("route", Text, ForeignKey("routes.name"), nullable=False),
    Column("input_usd_per_mtok", Numeric(18, 9), nullable=False),
    Column("output_usd_per_mtok", Numeric(18, 9), nullable=False),
    # In force from then on, until the next version of the same route.
    _timestamp("effective_from"),
    _timestamp("created_at", default="now()"),
    UniqueConstraint("route", "effective_from"),
    CheckConstraint("input_usd_per_mtok >= 0", name="input_usd_per_mtok"),
    CheckConstraint("output_usd_per_mtok >= 0", name="output_usd_per_mtok"),
)

usage_events = Table(
    "usage_events",
    metadata,
    Column("request_id", Uuid, primary_key=True),
    # In the key, because a partitioned table's key must hold the column it is partitioned by.
    Column("admitted_at", DateTime(timezone=True), primary_key=True),
    # 1; 2 when the gateway's own settlement came after the janitor's.
    Column("revision", Integer, nullable=False),
    Column("tenant_id", Uuid, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("route", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("usage_source", Text, nullable=False),
    Column("charged_nano_usd", BigInteger, nullable=False),
    Column("cost_nano_usd", BigInteger, nullable=False),
    # NULL: unpriced, served by the route's policy.
    Column("price_id", Uuid),
    Column("over_bound", Boolean, nullable=False),
    Column("streamed", Boolean, nullable=False),
    Column("backend", Text),
    Column("attempts", Integer, nullable=False),
    Column("error_code", Text),
    Column("client_request_id", Text),
    Column("first_token_ms", BigInteger),
    Column("total_ms", BigInteger),
    _timestamp("recorded_at", default="now()"),
    Index(None, "tenant_id", "admitted_at"),
    CheckConstraint("status IN ('ok', 'aborted', 'failed', 'abandoned')", name="status"),
    CheckConstraint("charged_nano_usd >= 0 AND cost_nano_usd >= 0", name="amounts"),
    CheckConstraint("prompt_tokens >= 0 AND completion_tokens >= 0 AND cached_tokens >= 0", name="tokens"),
    postgresql_partition_by="RANGE (admitted_at)",
)

usage_rollup = Table(
    "usage_rollup",
    metadata,
    # Begin of 15 minutes, UTC: every time zone's midnight falls on a bucket's edge.
    Column("bucket", DateTime(timezone=True), primary_key=True),
    Column("tenant_id", Uuid, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("route", Text, primary_key=True),
    Column("status", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("charged_nano_usd", Numeric(38, 0), nullable=False),
    Column("cost_nano_usd", Numeric(38, 0), nullable=False),
    Index(None, "tenant_id", "bucket"),
)

refusals = Table(
    "refusals",
    metadata,
    Column("bucket", DateTime(timezone=True), primary_key=True),
    Column("tenant_id", Uuid, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("reason", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
)

refusal_batches = Table(
    "refusal_batches",
    metadata,
    # Batches of refusal counts already added, so that a crash before Redis forgets one does not add it twice.
    Column("id", Uuid, primary_key=True),
    _timestamp("recorded_at", default="now()"),
)

dead_usage_events = Table(
    "dead_usage_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("shard", Text, nullable=False),
    Column("entry_id", Text, nullable=False),
    # As it stood in the stream, byte for byte.
    Column("raw", LargeBinary, nullable=False),
    Column("error", Text, nullable=False),
    _timestamp("recorded_at", default="now()"),
    UniqueConstraint("shard", "entry_id"),
)
