"""What the API reference says of errors and of further media types, which Litestar cannot see in a signature."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, OpenAPIType, Operation, Schema

from gateway.http.openai.reference import ERROR

_TEXT: Final = Schema(type=OpenAPIType.STRING)
PROBLEM: Final = Schema(
    type=OpenAPIType.OBJECT,
    description="Problem details, RFC 9457.",
    required=["type", "title", "status", "detail"],
    properties={
        "type": _TEXT,
        "title": _TEXT,
        "status": Schema(type=OpenAPIType.INTEGER),
        "detail": Schema(type=OpenAPIType.STRING, description="What is wrong, and what to do about it."),
        "errors": Schema(
            type=OpenAPIType.ARRAY,
            description="The fields or parameters at fault.",
            items=Schema(
                type=OpenAPIType.OBJECT, required=["field", "detail"], properties={"field": _TEXT, "detail": _TEXT}
            ),
        ),
    },
)
ADMIN_ERRORS: Final = {
    "400": "A parameter is not valid; `detail` names it.",
    "401": "No administrator's key, or one that is not valid.",
    "403": "The key's role does not allow it.",
    "404": "What is named does not exist.",
    "503": "The gateway cannot reach its own services. Try again as `retry-after` says.",
}
TENANT_ERRORS: Final = {
    "400": "A parameter is not valid; `param` names it.",
    "401": "No API key, or one that is not valid.",
    "403": "The key lacks the scope `usage:read`.",
    "404": "What is named does not exist, or is another tenant's.",
    "503": "The gateway cannot reach its own services. Try again as `retry-after` says.",
}


def operation(errors: Mapping[str, str], *, media_types: tuple[str, ...] = ()) -> type[Operation]:
    """An operation class that adds ``errors`` and, to the good answer, texts of other types.

    errors: descriptions by status; ADMIN_ERRORS tells them as problem details, all others in OpenAI's shape.
    """
    problems = errors is ADMIN_ERRORS
    media_type = "application/problem+json" if problems else "application/json"
    schema = PROBLEM if problems else ERROR

    @dataclass
    class DocumentedOperation(Operation):
        def __post_init__(self) -> None:
            responses = self.responses = dict(self.responses or {})
            good = responses.get("200")
            if isinstance(good, OpenAPIResponse):
                good.content = {
                    **(good.content or {}),
                    **{name: OpenAPIMediaType(schema=_TEXT) for name in media_types},
                }
            for status, description in errors.items():
                content = {media_type: OpenAPIMediaType(schema=schema)}
                responses[status] = OpenAPIResponse(description=description, content=content)

    return DocumentedOperation
