"""Values on the command line, read strictly, and tables to show them."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, TypeVar

import click

from gateway.billing.usage import NANO_PER_USD

Unlimited = Literal["unlimited"]
UNLIMITED: Unlimited = "unlimited"
Never = Literal["never"]
NEVER: Never = "never"
T = TypeVar("T")
_DURATION = re.compile(r"(\d{1,7})([smhd])", re.ASCII)
_AHEAD = re.compile(r"(\d{1,5})([hd])", re.ASCII)


class LimitType(click.ParamType[int | Unlimited]):
    """A whole number, or ``unlimited``."""

    name = "N|unlimited"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Unlimited:
        if isinstance(value, int):
            return value
        if value == UNLIMITED:
            return UNLIMITED
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            self.fail(f"{value!r} is neither a whole number nor `unlimited`", param, ctx)
        return int(value)


class UsdType(click.ParamType[int | Unlimited]):
    """An amount in USD as integer nano-USD, or ``unlimited``."""

    name = "USD|unlimited"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Unlimited:
        if isinstance(value, int):
            return value
        if value == UNLIMITED:
            return UNLIMITED
        try:
            amount = Decimal(value)
        except InvalidOperation:
            amount = Decimal("NaN")
        if not (amount.is_finite() and 0 <= amount < 10**9):
            self.fail(f"{value!r} is not an amount in USD such as 25 or 0.50, nor `unlimited`", param, ctx)
        nano = amount * NANO_PER_USD
        if nano != int(nano):
            self.fail("an amount has at most 9 decimal places", param, ctx)
        return int(nano)


class CountType(click.ParamType[int]):
    """A whole number."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            self.fail(f"{value!r} is not a whole number", param, ctx)
        return int(value)


class PercentType(click.ParamType[int]):
    """A percentage as hundredths of a percent: ``12.5`` or ``12.5%`` is 1250."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            hundredths = Decimal(value.removesuffix("%")) * 100
        except InvalidOperation:
            hundredths = Decimal("NaN")
        if not (hundredths.is_finite() and abs(hundredths) < 10**9 and hundredths == int(hundredths)):
            self.fail(f"{value!r} is not a percentage such as 20 or 12.5, of two decimal places at most", param, ctx)
        return int(hundredths)


class DurationType(click.ParamType[float]):
    """A time such as ``90s``, ``30m``, ``12h`` or ``7d``, in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(value)
        if match is None:
            self.fail(f"{value!r} is not a time; write 90s, 30m, 12h or 7d", param, ctx)
        return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


class MomentType(click.ParamType[date | datetime]):
    """A date (its midnight, in the zone given later to ``resolve``) or a time with its zone."""

    name = "DATE|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date | datetime:
        if isinstance(value, date):
            return value
        try:
            if re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII):
                return date.fromisoformat(value)
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time; write 2027-01-31 or 2027-01-31T12:00:00Z", param, ctx)
        if moment.tzinfo is None:
            self.fail(f"{value!r} has no time zone; write 2027-01-31T12:00:00Z", param, ctx)
        return moment


class ExpiryType(MomentType):
    """As MomentType, or a time from now: ``12h``, ``30d``."""

    name = "DATE|TIME|30d"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date | datetime:
        if isinstance(value, str) and (match := _AHEAD.fullmatch(value)):
            hours = int(match[1]) * (24 if match[2] == "d" else 1)
            return datetime.now(UTC) + timedelta(hours=hours)
        return super().convert(value, param, ctx)


class ExpiryOrNeverType(click.ParamType["date | datetime | Never"]):
    """As ExpiryType, or ``never``."""

    name = "DATE|TIME|30d|never"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> date | datetime | Never:
        return NEVER if value == NEVER else ExpiryType().convert(value, param, ctx)


def resolve(moment: date | datetime | None, zone: tzinfo = UTC) -> datetime | None:
    """The moment that a MomentType stands for."""
    if moment is None or isinstance(moment, datetime):
        return moment
    return datetime.combine(moment, time(), zone)


def zone_named(name: str) -> tzinfo:
    """Raises click.BadParameter."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise click.BadParameter(f"{name!r} is not a time zone; use an IANA name such as Europe/Berlin") from None


async def all_pages(page: Callable[[str | None], Awaitable[list[T]]], name: Callable[[T], str]) -> list[T]:
    """What a paged list holds in all. ``page`` gets the name of the last entry before."""
    found: list[T] = []
    while entries := await page(name(found[-1]) if found else None):
        found += entries
    return found


def echo_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Print columns; those named in ``numbers`` are aligned to the right."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    for line in [list(headers), *cells]:
        padded = (
            cell.rjust(width) if header in numbers else cell.ljust(width)
            for header, cell, width in zip(headers, line, widths, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def show_time(moment: datetime | None) -> str:
    return "-" if moment is None else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def printable(text: str) -> str:
    """What a terminal would obey is shown as a question mark."""
    return "".join(c if c.isprintable() else "?" for c in text)
