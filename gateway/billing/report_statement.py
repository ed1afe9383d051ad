"""The one query of the database that answers a report: sums by ids, then names, then the page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ARRAY, ColumnElement, DateTime, Numeric, Text, and_, cast, func, literal, or_, select

from gateway.billing.local_time import Range, Unit, label
from gateway.billing.report_query import STATUSES, CheckedQuery, Position, decode_cursor, encode_cursor
from gateway.billing.report_rows import AdminUsageRow, told
from gateway.billing.report_source import SUMS, Filters, rollup_or_rows, rows
from gateway.db.tables import api_keys, projects, tenants

UNITS: tuple[Unit, ...] = ("hour", "day", "month")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = {
    "tenant": "tenant_id",
    "project": "project_id",
    "key": "key_id",
    "model": "route",
    "backend": "backend",
    "end_user": "end_user",
    "tag": "tag",
    "status": "status",
}
# By what rows are sorted where a dimension is more than one column, or not text.
_SORTED_BY = {"tenant": ("tenant", "tenant_id"), "project": ("project", "project_id"), "key": ("key_id",)}
_AMOUNTS = {"charged": "charged_nano_usd", "cost": "cost_nano_usd"}


@dataclass(frozen=True, slots=True)
class Report:
    rows: list[AdminUsageRow]
    next_cursor: str | None
    """For the rows after these; None: there are none."""


class Statement:
    """``begins``: of the time slots that are grouped by. ``viewer``: cursors of one are none of another's.

    Raises InvalidReport for a cursor that is not of this query.
    """

    def __init__(
        self,
        checked: CheckedQuery,
        filters: Filters,
        ranges: list[Range],
        begins: dict[Unit, list[datetime]],
        viewer: str,
    ) -> None:
        self._checked = checked
        self._filters = filters
        self._ranges = ranges
        self._begins = begins
        self._fingerprint = checked.fingerprint(viewer)
        self._limit = checked.query.limit
        cursor = checked.query.cursor
        self._position = None if cursor is None else decode_cursor(cursor, self._fingerprint, self._kinds())

    def query(self) -> Any:
        page = self._named().subquery("named")
        columns = [(page.c[name], descending) for name, descending in self._order()]
        query = select(page)
        if self._position is not None:
            query = query.where(self._after(columns, self._position))
        query = query.order_by(*(_collated(c).desc() if descending else _collated(c) for c, descending in columns))
        return query if self._limit is None else query.limit(self._limit + 1)

    def report(self, found: list[Any]) -> Report:
        more = self._limit is not None and len(found) > self._limit
        shown = found[: self._limit] if more else found
        cursor = encode_cursor(self._fingerprint, self._place(shown[-1])) if more else None
        return Report([told(row, self._checked.group_by, self._labels(row)) for row in shown], cursor)

    def _sums(self) -> Any:
        """By ids and status, so that names are looked up for groups only, and each status is counted in one pass."""
        wanted = self._checked.group_by
        if self._checked.from_rows:
            source = rows(self._ranges, self._filters, each_tag="tag" in wanted).subquery("source")
        else:
            source = rollup_or_rows(self._ranges, self._filters).subquery("source")
        columns = [_COLUMNS[dimension] for dimension in wanted if dimension in _COLUMNS]
        keys: dict[str, ColumnElement[Any]] = {name: source.c[name] for name in columns}
        keys["status"] = source.c.status
        for unit, begins in self._begins.items():
            edges = cast(literal(begins, ARRAY(DateTime(timezone=True))), ARRAY(DateTime(timezone=True)))
            keys[unit] = func.width_bucket(source.c.moment, edges)
        slotted = select(
            *(each.label(name) for name, each in keys.items()), source.c.requests, *(source.c[name] for name in SUMS)
        )
        inner = slotted.subquery("slotted")
        groups = [inner.c[name] for name in keys]
        return select(*groups, *(func.sum(inner.c[name]).label(name) for name in ("requests", *SUMS))).group_by(*groups)

    def _named(self) -> Any:
        sums = self._sums().subquery("sums")
        labels: dict[str, Any] = {}
        joined: Any = sums
        for dimension in self._checked.group_by:
            if dimension in ("tenant", "project"):
                table = tenants if dimension == "tenant" else projects
                given = sums.c[_COLUMNS[dimension]]
                joined = joined.outerjoin(table, table.c.id == given)
                labels[dimension] = func.coalesce(table.c.name, cast(given, Text))
                labels[f"{dimension}_id"] = cast(given, Text)
            elif dimension == "key":
                joined = joined.outerjoin(api_keys, api_keys.c.public_id == sums.c.key_id)
                labels |= {"key_id": sums.c.key_id, "key_name": api_keys.c.name}
            else:
                labels[dimension] = sums.c[_COLUMNS.get(dimension, dimension)]
        requests = func.sum(sums.c.requests)
        return (
            select(
                *(each.label(name) for name, each in labels.items()),
                requests.label("requests"),
                *(func.sum(sums.c[name]).label(name) for name in SUMS),
                *(
                    func.coalesce(requests.filter(sums.c.status == status), 0).label(f"of_{status}")
                    for status in STATUSES
                ),
            )
            .select_from(joined)
            .group_by(*labels.values())
            .having(requests > 0)
        )

    def _order(self) -> list[tuple[str, bool]]:
        """Column and whether the largest comes first. The dimensions make each row's place its own."""
        first = self._checked.order_by
        order: dict[str, bool] = {}
        for name in (first, *self._checked.group_by):
            if name is not None:
                columns = _SORTED_BY.get(name, (_AMOUNTS.get(name, name),))
                for column in columns:
                    order.setdefault(column, name == first and self._checked.descending)
        return list(order.items())

    def _kinds(self) -> list[type]:
        numbers = {"requests", *SUMS, *UNITS}
        return [int if name in numbers else str for name, _ in self._order()]

    def _place(self, row: Any) -> Position:
        return [
            self._slot_place(name, getattr(row, name)) if name in self._begins else kind(getattr(row, name))
            for (name, _), kind in zip(self._order(), self._kinds(), strict=True)
        ]

    def _slot_place(self, unit: Any, slot: int) -> int:
        return (self._begins[unit][slot - 1] - _EPOCH) // timedelta(seconds=1)

    def _slot(self, unit: Any, place: int) -> int:
        """The last slot that begins no later: more may have been recorded since, before and after."""
        return sum(self._slot_place(unit, slot) <= place for slot in range(1, len(self._begins[unit]) + 1))

    def _after(self, columns: list[tuple[Any, bool]], position: Position) -> Any:
        choices: list[Any] = []
        same: list[Any] = []
        for (column, descending), value in zip(columns, position, strict=True):
            here = _collated(column)
            there: Any = literal(value)
            if column.name in self._begins:
                there = literal(self._slot(column.name, int(value)))
            elif isinstance(value, int):
                there = cast(literal(str(value)), Numeric)
            choices.append(and_(*same, here < there if descending else here > there))
            same.append(here == there)
        return or_(*choices)

    def _labels(self, row: Any) -> dict[str, Any]:
        return {
            unit: label(unit, begins[getattr(row, unit) - 1], self._checked.zone)
            for unit, begins in self._begins.items()
        }


def _collated(column: Any) -> Any:
    """Text sorts alike on every server."""
    return column.collate("C") if isinstance(column.type, Text) else column
