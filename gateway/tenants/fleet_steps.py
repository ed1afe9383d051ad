"""Steps of a fleet file's plan, and how their differences read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal, TypeVar

import msgspec

from gateway.routing.route import Target
from gateway.tenants.records import ConfigurationError

T = TypeVar("T")
Sign = Literal["+", "~", "-"]
TellSecret = Callable[[str, str], None]
"""Is given a name and a secret, which nobody will see again, as soon as it is made."""


@dataclass(frozen=True, slots=True)
class Step:
    sign: Sign
    """New, changed, or taken away."""
    what: str
    make: Callable[[], Awaitable[object]]
    details: tuple[str, ...] = ()


async def all_pages(page: Callable[[str | None], Awaitable[list[T]]], cursor: Callable[[T], str]) -> list[T]:
    """What a paged list holds in all. ``page`` gets the cursor of the last entry before."""
    found: list[T] = []
    while entries := await page(cursor(found[-1]) if found else None):
        found += entries
    return found


def at(place: str, check: Callable[[], T]) -> T:
    """What ``check`` gives. Raises ConfigurationError that names the place."""
    try:
        return check()
    except ConfigurationError as fault:
        raise ConfigurationError(f"{place}: {fault}") from fault


def differences(old: object, changed: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}: {shown(getattr(old, name))} -> {shown(value)}" for name, value in changed.items())


def shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Target):
        return f"{value.backend_model} of {value.pool} (weight {value.weight:g}, priority {value.priority})"
    if isinstance(value, msgspec.Struct):
        given: dict[str, Any] = msgspec.to_builtins(value)
        return ", ".join(f"{name} {shown(part)}" for name, part in given.items()) or "as usual"
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Collection) and not isinstance(value, str):
        return ", ".join(sorted(map(shown, value))) or "none"
    return str(value)
