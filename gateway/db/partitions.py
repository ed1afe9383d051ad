"""Monthly partitions of ``usage_events``: made ahead, and whenever a row needs one."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

PARTITION_LOCK = 7_233_921_001
"""Advisory lock under which partitions are made: ``IF NOT EXISTS`` alone may fail when two sessions race."""


def month_of(moment: datetime) -> datetime:
    """Begin of the UTC month that holds ``moment``."""
    utc = moment.astimezone(UTC)
    return datetime(utc.year, utc.month, 1, tzinfo=UTC)


def next_month(month: datetime) -> datetime:
    return datetime(month.year + month.month // 12, month.month % 12 + 1, 1, tzinfo=UTC)


def months_ahead(moment: datetime, count: int) -> Iterator[datetime]:
    """The month of ``moment`` and the ``count`` months after it."""
    month = month_of(moment)
    for _ in range(count + 1):
        yield month
        month = next_month(month)


def partition_ddl(month: datetime) -> str:
    """The statement that makes the partition of one month, if it is not there."""
    begin, end = month_of(month), next_month(month_of(month))
    return (
        f"CREATE TABLE IF NOT EXISTS usage_events_{begin:%Y_%m} PARTITION OF usage_events "
        f"FOR VALUES FROM ('{begin.isoformat()}') TO ('{end.isoformat()}')"
    )
