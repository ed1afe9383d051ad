"""Writes a batch of usage events into the ledger by one statement, if all of them are new and just as we write them.

Postgres reads the events' JSON itself, so that this process hands on bytes and looks into none of them. Whatever is out
of the ordinary is left to ``entries.read_entry`` and ``ledger.record``, which know what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import get_args

from sqlalchemy import Text, text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing.entries import (
    EARLIEST,
    LATEST_AHEAD,
    MAX_AMOUNT,
    MAX_ATTEMPT_TEXT,
    MAX_ATTEMPTS,
    MAX_KEY_TEXT,
    MAX_MS,
    MAX_REVISION,
    MAX_TAG_TEXT,
    MAX_TAGS,
    MAX_TOKENS,
    NOTES,
    RANGES,
)
from gateway.billing.ledger import ADD_TO_SUMS, ROLLUP_KEY, ROLLUP_SUMS, column_type
from gateway.billing.usage import Status, UsageEvent, UsageSource
from gateway.db.tables import usage_events, usage_rollup

REVISIONS = frozenset(b"%d" % number for number in range(1, MAX_REVISION + 1))
_SEPARATOR = b"\x1e"
"""Stands in no JSON: neither as itself in a string nor between values (RFC 7464 uses it so)."""
_INSTANT = r"^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?Z$"


class NotPlain(Exception):
    """Some event of the batch needs a closer look. The transaction must be rolled back."""


async def record_plain(connection: AsyncConnection, events: Sequence[tuple[bytes, bytes]], now: datetime) -> None:
    """Write events, each with its revision, and add them to the rollups, as ``ledger.record`` does.

    ``events``: JSON of each, and its revision, one of REVISIONS. Raises NotPlain or one of ``ledger.ROW_FAULTS``.
    """
    try:
        batch = _SEPARATOR.join([event for event, _ in events]).decode()
    except UnicodeDecodeError as fault:
        raise NotPlain from fault
    revisions = b",".join([revision for _, revision in events]).decode()
    parameters = {"events": batch, "revisions": f"{{{revisions}}}", "latest": now + LATEST_AHEAD}
    if not await connection.scalar(_RECORD, parameters):
        raise NotPlain


def _ranges() -> str:
    """What ``read_entry`` would neither refuse nor change."""
    amounts = dict.fromkeys(("charged_nano_usd", "cost_nano_usd"), (0, MAX_AMOUNT))
    tokens = dict.fromkeys(("prompt_tokens", "completion_tokens"), (0, MAX_TOKENS))
    durations = dict.fromkeys(("first_token_ms", "total_ms", "queue_ms"), (0, MAX_MS))
    names = dict.fromkeys(("length(key_id)", "length(route)"), (1, MAX_KEY_TEXT))
    notes = {f"length({name})": (0, longest) for name, longest in NOTES.items()}
    ranges = amounts | tokens | durations | names | notes | RANGES
    return " AND ".join(f"({name} BETWEEN {least} AND {most}) IS NOT FALSE" for name, (least, most) in ranges.items())


def _statement() -> str:
    """True: all were written. False: nothing was, or not all.

    An event is plain if it is, to the byte, what Postgres would write of the row that it read from it: then no field
    is missing, unknown, there twice or of another type, and each has its one spelling. Its time alone is spelled in
    another way than Postgres', and stays text for that comparison.

    Rows are inserted before sums are changed, and both in the order of their keys, as in ``ledger.record``, so that
    no two batches wait for one another.
    """
    names = UsageEvent.__struct_fields__
    fields = ", ".join(names)
    types = ", ".join(
        f"{name} {'text' if name == 'admitted_at' else column_type(usage_events.c[name])}" for name in names
    )
    one_of = {"status": Status, "usage_source": UsageSource}
    kinds = " AND ".join(
        f"{name} IN ({', '.join(repr(choice) for choice in get_args(choices))})" for name, choices in one_of.items()
    )
    order = ", ".join(
        f'{name} COLLATE "C"' if isinstance(usage_rollup.c[name].type, Text) else name for name in ROLLUP_KEY
    )
    sums = ", ".join("count(*)" if name == "requests" else f"sum({name})" for name in ROLLUP_SUMS)
    key = ", ".join(ROLLUP_KEY)
    return f"""
WITH given AS MATERIALIZED (
  SELECT {fields.replace("admitted_at", "CAST(admitted_at AS timestamptz) AS admitted_at")}, revision, place,
    raw = (SELECT CAST(row_to_json(event) AS text) FROM (SELECT {fields}) AS event)
    AND revision IS NOT NULL
    AND admitted_at ~ '{_INSTANT}'
    AND CAST(admitted_at AS timestamptz) BETWEEN '{EARLIEST.isoformat()}' AND CAST(:latest AS timestamptz)
    AND {kinds}
    AND {_ranges()}
    AND CASE WHEN tags = '{{}}' THEN true ELSE cardinality(tags) <= {MAX_TAGS}
      AND (SELECT bool_and((length(tag) BETWEEN 1 AND {MAX_TAG_TEXT}) IS TRUE) FROM unnest(tags) AS tag)
      AND tags = ARRAY(SELECT DISTINCT tag COLLATE "C" AS tag FROM unnest(tags) AS tag ORDER BY tag) END
    AND CASE WHEN failed_attempts = '{{}}' THEN true ELSE cardinality(failed_attempts) <= {MAX_ATTEMPTS}
      AND array_ndims(failed_attempts) = 1
      AND (SELECT bool_and((length(attempt) <= {MAX_ATTEMPT_TEXT}) IS TRUE) FROM unnest(failed_attempts) AS attempt) END
    AS plain
  FROM ROWS FROM (
    json_to_recordset(CAST('[' || replace(CAST(:events AS text), chr(30), ',') || ']' AS json)) AS ({types}),
    unnest(string_to_array(CAST(:events AS text), chr(30))),
    unnest(CAST(:revisions AS integer[]))
  ) WITH ORDINALITY AS batch ({fields}, raw, revision, place)
), latest AS (
  SELECT DISTINCT ON (request_id, admitted_at) {fields}, revision FROM given
  WHERE (SELECT bool_and(plain IS TRUE) FROM given)
  ORDER BY request_id, admitted_at, revision DESC, place
), written AS (
  INSERT INTO usage_events ({fields}, revision) SELECT {fields}, revision FROM latest ORDER BY request_id, admitted_at
  ON CONFLICT DO NOTHING
  RETURNING date_bin('15 minutes', admitted_at, TIMESTAMPTZ 'epoch') AS bucket, tenant_id, project_id, key_id, route,
    coalesce(backend, '') AS backend, status, {", ".join(ROLLUP_SUMS[1:])}
), added AS (
  INSERT INTO usage_rollup AS kept ({key}, {", ".join(ROLLUP_SUMS)})
  SELECT {key}, {sums} FROM written GROUP BY {key} ORDER BY {order}
  {ADD_TO_SUMS}
)
SELECT (SELECT bool_and(plain IS TRUE) FROM given)
  AND (SELECT count(*) FROM latest) = (SELECT count(*) FROM written)
"""


_RECORD = text(_statement())
