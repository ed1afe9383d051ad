"""What the resources of the admin API share: pages, entity tags, bodies, and what the API reference says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, TypeVar
from urllib.parse import quote

import msgspec
from litestar import Response
from litestar.dto import AbstractDTO
from litestar.openapi.spec import (
    Example,
    OpenAPIHeader,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Reference,
    RequestBody,
    Schema,
)
from litestar.params import HeaderParameter, PathParameter, QueryParameter
from litestar.typing import FieldDefinition
from msgspec import UNSET

from gateway.http.errors import Problem
from gateway.http.operations import PROBLEM
from gateway.tenants.records import MAX_NAME, NAME_PATTERN, VersionConflict, is_name

if TYPE_CHECKING:
    from litestar._openapi.schema_generation import SchemaCreator

T = TypeVar("T")
MAX_PAGE = 500
PREFIX = "/admin/v1"
Name = Annotated[
    str,
    msgspec.Meta(
        pattern=f"^{NAME_PATTERN}$",
        max_length=MAX_NAME,
        description="1 to 100 letters, digits and . _ - / :, beginning with a letter or digit; parts between slashes "
        "are not empty and do not begin with a dot.",
    ),
]
_TAG = re.compile(r'\s*(?:W/)?"([0-9]{1,18})"\s*', re.ASCII)
_NAMED_FIELD = re.compile(r"field `([^`]{1,100})`")
_NO_SUCH_VERSION = -1

PageSize = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE, description="Most entries of the answer.")]
After = Annotated[
    str | None,
    QueryParameter(min_length=1, description="Only what comes after this entry: `next` of the answer before."),
]
Archived = Annotated[bool, QueryParameter(description="Those that are archived, too.")]
IfMatch = Annotated[
    str | None,
    HeaderParameter(
        name="if-match",
        description="The `ETag` of what is to be changed, as it was read. If it has another by now, the answer is 412 "
        "and nothing is changed. Without it the change is made whatever there is.",
    ),
]
TenantRef = Annotated[
    str,
    PathParameter(
        description="Name or id of the tenant; a name with a slash: the id.",
        examples=[Example(summary="A name", value="demo")],
    ),
]

_DESCRIPTIONS: Final = {
    400: "The request is not valid; `detail` says what to mend, and `errors` names the fields.",
    401: "No administrator's key, or one that is not valid.",
    403: "The key's role does not allow it; `detail` says which does.",
    404: "What is named, in the path or in the body, does not exist, or belongs to another tenant.",
    408: "The body did not arrive in time.",
    409: "It exists already, or its state does not allow the change.",
    412: "It is not as `If-Match` says any more; `ETag` tells how it is now.",
    413: "The body is too large.",
    415: "The body is not sent as JSON, or is compressed.",
    503: "The gateway cannot reach its own services. Try again as `retry-after` says.",
}
_HEADER: Final = Schema(type=OpenAPIType.STRING)


class Page(msgspec.Struct, Generic[T], frozen=True):
    """``next``: give it as ``after`` to get what comes after these; null: that is all."""

    data: list[T]
    next: str | None


def page_of(entries: Sequence[T], limit: int, cursor: Callable[[T], str]) -> tuple[list[T], str | None]:
    """The first ``limit`` of ``entries``, which are one more if there is a next page, and that page's cursor."""
    shown = list(entries[:limit])
    return shown, cursor(shown[-1]) if len(entries) > limit else None


def page_behind(entries: Sequence[T], after: str | None, limit: int, cursor: Callable[[T], str]) -> Sequence[T]:
    """Of all ``entries``, those behind the one whose cursor is ``after``, as ``page_of`` takes them. Raises Problem."""
    begin = 0
    if after is not None:
        cursors = [cursor(entry) for entry in entries]
        if after not in cursors:
            raise bad_cursor()
        begin = cursors.index(after) + 1
    return entries[begin : begin + limit + 1]


def name_cursor(after: str | None) -> str | None:
    """``after``, if it can be a name. Raises Problem."""
    if after is not None and not is_name(after):
        raise bad_cursor()
    return after


def bad_cursor() -> Problem:
    return Problem(400, "'after' must be the `next` of an earlier answer; leave it out to begin anew.", field="after")


def etag(version: int) -> str:
    return f'"{version}"'


def single(content: T, version: int, *, created_at: str | None = None, secret: bool = False) -> Response[T]:
    """The answer that shows one resource. ``created_at``: its path, segments not yet quoted, if it is new."""
    headers = {"etag": etag(version)}
    if created_at is not None:
        headers["location"] = PREFIX + quote(created_at)
    if secret:
        headers["cache-control"] = "no-store"
    return Response(content, headers=headers, media_type="application/json")


def expected_version(if_match: str | None) -> int | None:
    """The version that ``If-Match`` names; None: any. Raises Problem for several."""
    if if_match is None or if_match.strip() == "*":
        return None
    if match := _TAG.fullmatch(if_match):
        return int(match[1])
    if "," in if_match:
        raise Problem(400, "'if-match' takes one entity tag here: the `ETag` of the answer that was read.")
    return _NO_SUCH_VERSION


def check_immutable(kind: str, target: str, if_match: str | None) -> None:
    """``If-Match`` of what never changes. Raises VersionConflict."""
    expected = expected_version(if_match)
    if expected not in (None, 1):
        raise VersionConflict(kind, target, expected or 0, 1)


def given(body: msgspec.Struct) -> dict[str, Any]:
    """The fields that a merge patch has."""
    return {name: value for name, value in msgspec.structs.asdict(body).items() if value is not UNSET}


class Body(AbstractDTO[T], Generic[T]):
    """Reads a body strictly: no text where a number belongs, no field that nobody knows."""

    @classmethod
    def create_for_field_definition(cls, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: msgspec knows the type."""

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: SchemaCreator
    ) -> Reference | Schema:
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Any:
        raise NotImplementedError

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        raise NotImplementedError

    def decode_bytes(self, value: bytes) -> Any:
        try:
            return msgspec.json.decode(value, type=self.model_type)
        except msgspec.ValidationError as fault:
            message, field = _fault(str(fault))
            where = f"{field}: " if field else ""
            raise Problem(400, f"{where}{message}.", field=field) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise Problem(400, f"The body is not JSON: {fault}.") from None


def _fault(text: str) -> tuple[str, str | None]:
    """What msgspec says is wrong, and the field that it is about."""
    message, _, place = text.partition(" - at `$")
    path = place.rstrip("`").lstrip(".")
    named = _NAMED_FIELD.search(message)
    return message, ".".join(filter(None, (path, named[1] if named else ""))) or None


def documented(
    *statuses: int,
    example: Mapping[str, Any] | None = None,
    tagged: bool = False,
    created: bool = False,
) -> type[Operation]:
    """An operation that tells of the problems ``statuses`` beside those that any has, of its headers, and of a body
    that works. tagged: bears an ``ETag``; created: and a ``Location``."""
    with_body = (408, 413, 415) if example is not None else ()
    problems = sorted({400, 401, 503, *with_body, *statuses})

    @dataclass
    class AdminOperation(Operation):
        def __post_init__(self) -> None:
            responses = self.responses = dict(self.responses or {})
            for status in problems:
                headers = {"ETag": OpenAPIHeader(schema=_HEADER)} if status == 412 else None
                content = {"application/problem+json": OpenAPIMediaType(schema=PROBLEM)}
                responses[str(status)] = OpenAPIResponse(_DESCRIPTIONS[status], content=content, headers=headers)  # type: ignore[arg-type]
            for status, answer in responses.items():
                if status.startswith("2") and isinstance(answer, OpenAPIResponse):
                    names = ["ETag"] * tagged + ["Location"] * created
                    answer.headers = {name: OpenAPIHeader(schema=_HEADER, required=True) for name in names}
            if example is not None and isinstance(self.request_body, RequestBody):
                for media in self.request_body.content.values():
                    media.example = dict(example)

    return AdminOperation
