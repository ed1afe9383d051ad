"""What both doors of the prompt log share: parameters, answers, and the export's way to the client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from uuid import UUID

import msgspec
from litestar import Response
from litestar.di import NamedDependency, Provide
from litestar.params import PathParameter, QueryParameter, SkipValidation
from litestar.response import Stream

from gateway.administration.prompts import HashEndUser
from gateway.http.errors import Problem
from gateway.promptlog.entry import Feedback, Kept, Logged
from gateway.promptlog.exporting import line
from gateway.promptlog.filters import Filters
from gateway.promptlog.reader import MAX_LIMIT, Page
from gateway.tenants.end_users import HASH_LENGTH
from gateway.tenants.plain_text import check_plain

JSON_LINES: Final = "application/x-ndjson"
PIECE_BYTES: Final = 64 * 1024
"""Lines of an export are sent together up to so much."""
_NO_STORE: Final = {"cache-control": "private, no-store"}
_EARLIEST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)

Start = Annotated[
    datetime | None, QueryParameter(description="Admitted from this time on, with its zone: 2027-01-01T00:00:00Z.")
]
End = Annotated[datetime | None, QueryParameter(description="Admitted before this time.")]
Model = Annotated[str | None, QueryParameter(description="Only for this model, as the client named it.")]
Status = Annotated[str | None, QueryParameter(description="Only with this status: ok, failed, aborted, cache_hit, ...")]
EndUser = Annotated[
    str | None, QueryParameter(min_length=1, description="Only of this end user, by the id that the client sent.")
]
EndUserHash = Annotated[
    str | None,
    QueryParameter(
        pattern=f"^[0-9a-f]{{{HASH_LENGTH}}}$", description="As `end_user`, by the hash that entries and reports show."
    ),
]
Tag = Annotated[str | None, QueryParameter(description="Only with this tag.")]
ProjectId = Annotated[UUID | None, QueryParameter(description="Only of this project, by its id.")]
KeyId = Annotated[str | None, QueryParameter(description="Only by this key, by its public id.")]
Text = Annotated[
    str,
    QueryParameter(
        min_length=1, max_length=1000, description="What is looked for in requests and answers, in either case."
    ),
]
Cursor = Annotated[
    str | None, QueryParameter(min_length=1, description="`next_cursor` of the answer before, with the same query.")
]
Limit = Annotated[int, QueryParameter(ge=1, le=MAX_LIMIT, description="Most entries of the answer.")]
RequestRef = Annotated[str, PathParameter(description="The request's id: the `x-request-id` of its answer.")]


class ListedPrompt(msgspec.Struct, frozen=True):
    entry: Kept
    feedback: Feedback | None


class PromptList(msgspec.Struct, frozen=True):
    """The newest first. ``next_cursor``: give it as ``cursor`` to go on, also after a page with few entries or none;
    null: that was all. ``examined``: how many entries were looked at."""

    data: list[ListedPrompt]
    next_cursor: str | None
    examined: int


class LoggedPrompt(msgspec.Struct, frozen=True):
    """``request`` and ``response``: as they were logged; JSON as such, what was cut or is none as a text; null: not
    logged."""

    entry: Kept
    feedback: Feedback | None
    request: Any
    response: Any


class PromptQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which entries are asked for."""

    filters: Filters
    """But for the end user."""
    end_user: str | None
    """As the client named them."""

    def of(self, tenant_id: UUID, hash_end_user: HashEndUser) -> Filters:
        if self.end_user is None:
            return self.filters
        return msgspec.structs.replace(self.filters, end_user=hash_end_user(tenant_id, self.end_user))


async def prompt_query(
    start: Start = None,
    end: End = None,
    model: Model = None,
    status: Status = None,
    end_user: EndUser = None,
    end_user_hash: EndUserHash = None,
    tag: Tag = None,
    project: ProjectId = None,
    key: KeyId = None,
) -> PromptQuery:
    """From the parameters of a request. Raises Problem, InvalidField (400)."""
    check_one_end_user(end_user, end_user_hash)
    for name, moment in (("start", start), ("end", end)):
        if moment is not None and moment.tzinfo is None:
            raise Problem(400, f"'{name}' needs its time zone: write 2027-01-01T00:00:00Z.", field=name)
    filters = Filters(
        since=None if start is None or start <= _EARLIEST else min(start, _LATEST),
        until=None if end is None or end >= _LATEST else max(end, _EARLIEST),
        model=check_plain("model", model),
        status=check_plain("status", status),
        end_user=end_user_hash,
        tag=check_plain("tag", tag),
        project_id=project,
        key_id=check_plain("key", key),
    )
    return PromptQuery(filters=filters, end_user=end_user)


WANTED: Final = {"wanted": Provide(prompt_query)}
"""The dependency of handlers that have a ``wanted``."""
Wanted = NamedDependency[SkipValidation[PromptQuery]]


def check_one_end_user(end_user: str | None, end_user_hash: str | None) -> None:
    """Raises Problem (400) if both are given."""
    if end_user is not None and end_user_hash is not None:
        raise Problem(400, "Name the end user by 'end_user' or by 'end_user_hash', not by both.", field="end_user_hash")


def listed(page: Page) -> PromptList:
    data = [ListedPrompt(summary.facts, summary.feedback) for summary in page.entries]
    return PromptList(data, page.cursor, page.examined)


def whole(logged: Logged) -> Response[LoggedPrompt]:
    body: Any = line(logged.facts, logged.feedback, logged.request, logged.response)
    return Response(body, media_type="application/json", headers=_NO_STORE)


async def exported(lines: AsyncGenerator[bytes, None]) -> Stream:
    """What fails before the first line is raised here, and has a status; later, the answer is broken off."""
    pieces = _pieces(lines)
    first = await anext(pieces, b"")
    headers = _NO_STORE | {"content-disposition": 'attachment; filename="prompts.jsonl"'}
    return Stream(_with_first(first, pieces), media_type=JSON_LINES, headers=headers)


async def _pieces(lines: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    waiting: list[bytes] = []
    size = 0
    async with aclosing(lines):
        async for each in lines:
            waiting.append(each)
            size += len(each)
            if size >= PIECE_BYTES:
                yield b"".join(waiting)
                waiting.clear()
                size = 0
    if waiting:
        yield b"".join(waiting)


async def _with_first(first: bytes, pieces: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(pieces):
        if first:
            yield first
        async for each in pieces:
            yield each
