"""What tenants, projects and routes want of the answer cache and the prompt log, and what kept answers saved."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

UPGRADE = """
ALTER TABLE tenants
    ADD COLUMN answer_cache jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN prompt_log jsonb NOT NULL DEFAULT '{}';
ALTER TABLE projects ADD COLUMN answer_cache jsonb NOT NULL DEFAULT '{}';
ALTER TABLE routes ADD COLUMN answer_cache jsonb NOT NULL DEFAULT '{}';
ALTER TABLE usage_events
    ADD COLUMN cache text,
    ADD COLUMN saved_nano_usd bigint NOT NULL DEFAULT 0,
    ADD COLUMN saved_tokens bigint NOT NULL DEFAULT 0;
ALTER TABLE usage_rollup
    ADD COLUMN saved_nano_usd numeric(38, 0) NOT NULL DEFAULT 0,
    ADD COLUMN saved_tokens bigint NOT NULL DEFAULT 0;
"""

DOWNGRADE = """
ALTER TABLE usage_rollup DROP COLUMN saved_nano_usd, DROP COLUMN saved_tokens;
ALTER TABLE usage_events DROP COLUMN cache, DROP COLUMN saved_nano_usd, DROP COLUMN saved_tokens;
ALTER TABLE routes DROP COLUMN answer_cache;
ALTER TABLE projects DROP COLUMN answer_cache;
ALTER TABLE tenants DROP COLUMN answer_cache, DROP COLUMN prompt_log;
"""


def upgrade() -> None:
    op.get_bind().exec_driver_sql(UPGRADE)


def downgrade() -> None:
    # What had no place before is lost: policies, and what was saved.
    op.get_bind().exec_driver_sql(DOWNGRADE)
