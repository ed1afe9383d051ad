"""Monthly partitions of ``usage_events``: made ahead, and whenever a row needs one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

PARTITION_LOCK = 7_233_921_001
"""Advisory lock under which partitions are made and dropped: ``IF NOT EXISTS`` may fail when two sessions race."""
RETENTION_LOCK = 7_233_921_002
"""Advisory lock of whoever looks for months to drop."""
_NAME = re.compile(r"usage_events_(\d{4})_(0[1-9]|1[0-2])", re.ASCII)


def month_of(moment: datetime) -> datetime:
    """Begin of the UTC month that holds ``moment``."""
    utc = moment.astimezone(UTC)
    return datetime(utc.year, utc.month, 1, tzinfo=UTC)


def next_month(month: datetime) -> datetime:
    return datetime(month.year + month.month // 12, month.month % 12 + 1, 1, tzinfo=UTC)


def months_before(month: datetime, count: int) -> datetime:
    """Begin of the month that is ``count`` months before; of the year 1 at the earliest."""
    years, rest = divmod(max(month.year * 12 + month.month - 1 - count, 12), 12)
    return datetime(years, rest + 1, 1, tzinfo=UTC)


def months_ahead(moment: datetime, count: int) -> Iterator[datetime]:
    """The month of ``moment`` and the ``count`` months after it."""
    month = month_of(moment)
    for _ in range(count + 1):
        yield month
        month = next_month(month)


def partition_name(month: datetime) -> str:
    return f"usage_events_{month:%Y_%m}"


def month_in_name(name: str) -> datetime | None:
    """The month whose partition bears this name; None: it is none of ours."""
    match = _NAME.fullmatch(name)
    return datetime(int(match[1]), int(match[2]), 1, tzinfo=UTC) if match else None


def partition_ddl(month: datetime) -> str:
    """The statement that makes the partition of one month, if it is not there."""
    begin, end = month_of(month), next_month(month_of(month))
    return (
        f"CREATE TABLE IF NOT EXISTS {partition_name(begin)} PARTITION OF usage_events "
        f"FOR VALUES FROM ('{begin.isoformat()}') TO ('{end.isoformat()}')"
    )
