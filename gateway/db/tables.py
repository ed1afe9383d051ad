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
from sqlalchemy.dialects.postgresql import JSONB

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
    _timestamp("created_at", default="now()"),
    # IANA zone: budget periods begin at its midnights.
    Column("timezone", Text, nullable=False, server_default=text("'UTC'")),
    Column("redis_loss", Text, nullable=False, server_default=text("'fail_closed'")),
    Column("markup_bp", Integer, nullable=False, server_default=text("0")),
    Column("weight", Double, nullable=False, server_default=text("1")),
    Column("webhook_url", Text),
    # Sealed by the deployment's secret key.
    Column("webhook_secret", LargeBinary),
    _timestamp("archived_at", nullable=True),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    # What differs from the usual in gateway.policies.answer_cache and gateway.policies.prompt_log.
    Column("answer_cache", JSONB, nullable=False, server_default=text("'{}'")),
    Column("prompt_log", JSONB, nullable=False, server_default=text("'{}'")),
    CheckConstraint("redis_loss IN ('fail_closed', 'fail_open')", name="redis_loss"),
    CheckConstraint("markup_bp BETWEEN -10000 AND 1000000", name="markup_bp"),
    CheckConstraint("weight > 0", name="weight"),
)

projects = Table(
    "projects",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    _timestamp("created_at", default="now()"),
    _timestamp("archived_at", nullable=True),
    Column("answer_cache", JSONB, nullable=False, server_default=text("'{}'")),
    UniqueConstraint("tenant_id", "name"),
)

limits = Table(
    "limits",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("subject", Text, nullable=False),
    # '' for the tenant and for each end user; else a project's id, a key's public id, a route, an end user's hash.
    Column("target", Text, nullable=False, server_default=text("''")),
    Column("metric", Text, nullable=False),
    # '' for concurrent requests.
    Column("window", Text, nullable=False),
    # Requests, tokens, slots, or nano-USD.
    Column("amount", BigInteger, nullable=False),
    Column("hard", Boolean, nullable=False, server_default=text("true")),
    Column("thresholds", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    _timestamp("created_at", default="now()"),
    UniqueConstraint("tenant_id", "subject", "target", "metric", "window"),
    CheckConstraint("subject IN ('tenant', 'project', 'key', 'end_user', 'model')", name="subject"),
    CheckConstraint(
        "(metric IN ('requests', 'tokens') AND \"window\" IN ('minute', 'hour', 'day')) "
        "OR (metric = 'concurrent' AND \"window\" = '') "
        "OR (metric = 'budget' AND \"window\" IN ('day', 'week', 'month', 'total'))",
        name="window",
    ),
    CheckConstraint("amount BETWEEN 0 AND 9007199254740991", name="amount"),
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
    Column("project_id", Uuid, ForeignKey("projects.id")),
    Column("max_context_tokens", Integer),
    Column("max_output_tokens", Integer),
    # Of an admin's key.
    Column("role", Text),
    # The secret before the last rotation, good until then.
    Column("previous_secret_sha256", LargeBinary),
    _timestamp("previous_until", nullable=True),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    CheckConstraint("(tenant_id IS NULL) = (project_id IS NULL)", name="project"),
    CheckConstraint("(tenant_id IS NULL) = (role IS NOT NULL)", name="role_of_admin"),
    CheckConstraint("role IN ('owner', 'admin', 'viewer')", name="role"),
    CheckConstraint("max_context_tokens > 0 AND max_output_tokens > 0", name="caps"),
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
    # Which tokenizer counts prompts: an encoding's name, or 'backend' for the one its workers tell. NULL: by bytes.
    Column("tokenizer", Text),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    _timestamp("created_at", default="now()"),
    # Of the first target, which pool and backend_model name; route_targets has the others.
    Column("weight", Double, nullable=False, server_default=text("1")),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("answer_cache", JSONB, nullable=False, server_default=text("'{}'")),
    CheckConstraint("weight >= 0", name="weight"),
    CheckConstraint("context_length > 0", name="context_length"),
    CheckConstraint("default_output_tokens BETWEEN 1 AND max_output_tokens", name="default_output_tokens"),
    CheckConstraint("timeout_s > 0", name="timeout_s"),
    CheckConstraint("unpriced IN ('refuse', 'serve')", name="unpriced"),
)

route_targets = Table(
    "route_targets",
    metadata,
    Column("route", Text, ForeignKey("routes.name", ondelete="CASCADE"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("pool", Text, ForeignKey("pools.name"), nullable=False, index=True),
    Column("backend_model", Text, nullable=False),
    Column("weight", Double, nullable=False),
    Column("priority", Integer, nullable=False),
    CheckConstraint("weight >= 0", name="weight"),
)

backends = Table(
    "backends",
    metadata,
    Column("name", Text, primary_key=True),
    Column("pool", Text, ForeignKey("pools.name"), nullable=False, index=True),
    # Whose server it is: a key of gateway.backends.brands.BRANDS, from which follows how it is spoken to.
    Column("brand", Text, nullable=False),
    Column("base_url", Text, nullable=False),
    # Sealed by the deployment's secret key, as are the headers (a JSON object); their names are no secret.
    Column("api_key", LargeBinary),
    Column("headers", LargeBinary),
    Column("header_names", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    # What to send as the model's name instead of the target's.
    Column("model", Text),
    Column("context_length", Integer, nullable=False),
    Column("weight", Double, nullable=False, server_default=text("1")),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    # NULL: as the gateway's settings have it.
    Column("connect_timeout_s", Double),
    Column("first_byte_timeout_s", Double),
    Column("idle_timeout_s", Double),
    Column("enabled", Boolean, nullable=False, server_default=text("true")),
    Column("version", BigInteger, nullable=False, server_default=text("1")),
    _timestamp("created_at", default="now()"),
    CheckConstraint("context_length > 0", name="context_length"),
    CheckConstraint("weight >= 0", name="weight"),
    CheckConstraint("connect_timeout_s > 0 AND first_byte_timeout_s > 0 AND idle_timeout_s > 0", name="timeouts"),
)

stored_responses = Table(
    "stored_responses",
    metadata,
    # Answers of the Responses API that later requests may build upon, until they expire.
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), primary_key=True),
    Column("id", Text, primary_key=True),
    Column("project_id", Uuid, nullable=False),
    # Request and answer, sealed by the deployment's secret key.
    Column("sealed", LargeBinary, nullable=False),
    _timestamp("created_at", default="now()"),
    _timestamp("expires_at"),
    # Keyed hashes of all end users, and ids of all earlier responses, that the conversation is of. NULL: not known.
    Column("end_users", ARRAY(Text)),
    Column("built_upon", ARRAY(Text)),
    Index(None, "expires_at"),
)

data_keys = Table(
    "data_keys",
    metadata,
    # By which a tenant's prompt log and kept answers are sealed. A row that is gone makes them unreadable everywhere.
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    # Keyed hash of the one end user whom the key is of; '': the tenant's own.
    Column("end_user", Text, nullable=False, server_default=text("''")),
    # Sealed by the master key that master_id names.
    Column("wrapped", LargeBinary, nullable=False),
    Column("master_id", Text, nullable=False, index=True),
    _timestamp("created_at", default="now()"),
    UniqueConstraint("tenant_id", "end_user"),
)


def _rate(name: str, *, nullable: bool = True) -> Column[Any]:
    return Column(name, Numeric(18, 9), nullable=nullable)


prices = Table(
    "prices",
    metadata,
    Column("id", Uuid, primary_key=True),
    # Of a route that may be gone since.
    Column("route", Text, nullable=False),
    # NULL: the list price, for every tenant without one of its own.
    Column("tenant_id", Uuid, ForeignKey("tenants.id")),
    # 'charge': what tenants pay; 'cost': what the backends cost us, if that is not the list price.
    Column("basis", Text, nullable=False, server_default=text("'charge'")),
    _rate("input_usd_per_mtok", nullable=False),
    _rate("output_usd_per_mtok", nullable=False),
    # NULL: as input.
    _rate("cached_input_usd_per_mtok"),
    _rate("cache_write_usd_per_mtok"),
    # NULL: as output.
    _rate("reasoning_usd_per_mtok"),
    # NULL: nothing.
    _rate("usd_per_request"),
    _rate("usd_per_image"),
    # Price of an hour of one device, for compute_us; the ceiling is what one request reserves of it.
    _rate("compute_usd_per_hour"),
    Column("compute_ceiling_s", Double),
    # Where it comes from, as 'genai-prices 0.0.40: openai/gpt-4o'. NULL: an administrator.
    Column("source", Text),
    # In force from then on, until the next version of the same route, tenant and basis begins, or this one ends.
    _timestamp("effective_from"),
    _timestamp("effective_until", nullable=True),
    _timestamp("created_at", default="now()"),
    # One that was withdrawn before it began leaves its place to another.
    Index(
        None,
        "route",
        "tenant_id",
        "basis",
        "effective_from",
        unique=True,
        postgresql_nulls_not_distinct=True,
        postgresql_where=text("effective_until IS NULL OR effective_until > effective_from"),
    ),
    CheckConstraint("basis IN ('charge', 'cost')", name="basis"),
    CheckConstraint("effective_until >= effective_from", name="effective_until"),
    CheckConstraint("basis = 'charge' OR tenant_id IS NULL", name="cost_of_all"),
    CheckConstraint("(compute_usd_per_hour IS NULL) = (compute_ceiling_s IS NULL)", name="compute_ceiling"),
    CheckConstraint(
        "input_usd_per_mtok >= 0 AND output_usd_per_mtok >= 0 AND cached_input_usd_per_mtok >= 0 "
        "AND cache_write_usd_per_mtok >= 0 AND reasoning_usd_per_mtok >= 0 AND usd_per_request >= 0 "
        "AND usd_per_image >= 0 AND compute_usd_per_hour >= 0 AND compute_ceiling_s > 0",
        name="rates",
    ),
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
    Column("project_id", Uuid, nullable=False),
    # Keyed hash; NULL: the request named none.
    Column("end_user", Text),
    Column("cache_write_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("reasoning_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("images", BigInteger, nullable=False, server_default=text("0")),
    Column("compute_us", BigInteger, nullable=False, server_default=text("0")),
    Column("cost_price_id", Uuid),
    Column("markup_bp", Integer, nullable=False, server_default=text("0")),
    Column("queue_ms", BigInteger),
    Column("tags", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    # Which of our APIs was called.
    Column("api", Text, nullable=False, server_default=text("'chat_completions'")),
    # Of the attempts that failed, in their order: backend and error code, with a space between.
    Column("failed_attempts", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    # By which tier a kept answer was found; NULL: by none.
    Column("cache", Text),
    # What the answer would have cost the tenant, and the tokens that it took when it was made.
    Column("saved_nano_usd", BigInteger, nullable=False, server_default=text("0")),
    Column("saved_tokens", BigInteger, nullable=False, server_default=text("0")),
    _timestamp("recorded_at", default="now()"),
    Index(None, "tenant_id", "admitted_at"),
    Index(None, "tenant_id", "end_user", "admitted_at", postgresql_where=text("end_user IS NOT NULL")),
    CheckConstraint("status IN ('ok', 'aborted', 'failed', 'abandoned', 'cache_hit', 'replayed')", name="status"),
    CheckConstraint("charged_nano_usd >= 0 AND cost_nano_usd >= 0", name="amounts"),
    CheckConstraint("prompt_tokens >= 0 AND completion_tokens >= 0 AND cached_tokens >= 0", name="tokens"),
    CheckConstraint(
        "cache_write_tokens >= 0 AND reasoning_tokens >= 0 AND images >= 0 AND compute_us >= 0", name="kinds"
    ),
    postgresql_partition_by="RANGE (admitted_at)",
)

usage_rollup = Table(
    "usage_rollup",
    metadata,
    # Begin of 15 minutes, UTC: every time zone's midnight falls on a bucket's edge.
    Column("bucket", DateTime(timezone=True), primary_key=True),
    Column("tenant_id", Uuid, primary_key=True),
    Column("project_id", Uuid, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("route", Text, primary_key=True),
    # '' where no backend was reached.
    Column("backend", Text, primary_key=True),
    Column("status", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("cache_write_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("images", BigInteger, nullable=False),
    Column("compute_us", BigInteger, nullable=False),
    Column("charged_nano_usd", Numeric(38, 0), nullable=False),
    Column("cost_nano_usd", Numeric(38, 0), nullable=False),
    Column("saved_nano_usd", Numeric(38, 0), nullable=False, server_default=text("0")),
    Column("saved_tokens", BigInteger, nullable=False, server_default=text("0")),
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
    # NULL: it had none that could be read.
    Column("revision", Integer),
    Column("error", Text, nullable=False),
    _timestamp("recorded_at", default="now()"),
    UniqueConstraint("shard", "entry_id"),
)

audit_log = Table(
    "audit_log",
    metadata,
    # What an administrator changed. Append-only: a trigger refuses updates and deletions.
    Column("id", Uuid, primary_key=True),
    _timestamp("at", default="now()"),
    # Public id of the admin's key, or 'cli' with the operating system's user.
    Column("actor", Text, nullable=False),
    # 'create', 'update', 'archive', 'revoke', 'rotate', 'delete', ...
    Column("action", Text, nullable=False),
    # 'tenant', 'project', 'key', 'admin_key', 'limit', 'pool', 'route', 'price', ...
    Column("kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("tenant_id", Uuid),
    # Never a secret, nor the hash of one.
    Column("before", JSONB),
    Column("after", JSONB),
    Index(None, "tenant_id", "id"),
)

alerts = Table(
    "alerts",
    metadata,
    # A budget's threshold that was crossed, once a period; told by webhook until it was taken or given up.
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, ForeignKey("tenants.id"), nullable=False),
    Column("limit_id", Uuid, nullable=False),
    _timestamp("period_start"),
    # Percent of the amount.
    Column("threshold", Integer, nullable=False),
    Column("spent_nano_usd", BigInteger, nullable=False),
    Column("amount_nano_usd", BigInteger, nullable=False),
    # Subject, target and window of the limit as it was then.
    Column("subject", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("window", Text, nullable=False),
    _timestamp("crossed_at"),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    _timestamp("next_attempt_at", nullable=True),
    _timestamp("delivered_at", nullable=True),
    _timestamp("given_up_at", nullable=True),
    Column("last_error", Text),
    # A limit of each end user apart is crossed by each of them.
    UniqueConstraint("limit_id", "target", "period_start", "threshold"),
)
