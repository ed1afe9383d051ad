"""What the API reference says of Anthropic's endpoints, whose bodies Litestar does not see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from litestar.openapi.spec import (
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Parameter,
    RequestBody,
    Schema,
)

from gateway.http.memory_reference import ANSWER_HEADERS, REQUEST_HEADERS

_STRING = Schema(type=OpenAPIType.STRING)
_OBJECT = Schema(type=OpenAPIType.OBJECT)
_OBJECTS = Schema(type=OpenAPIType.ARRAY, items=_OBJECT)
_TEXT_OR_BLOCKS = Schema(one_of=[_STRING, _OBJECTS])
_MESSAGE = Schema(
    type=OpenAPIType.OBJECT,
    required=["role", "content"],
    properties={
        "role": Schema(type=OpenAPIType.STRING, enum=["user", "assistant", "system"]),
        "content": _TEXT_OR_BLOCKS,
    },
)
_PROMPT = {
    "model": Schema(type=OpenAPIType.STRING, description="A name that `GET /v1/models` lists."),
    "messages": Schema(type=OpenAPIType.ARRAY, items=_MESSAGE, min_items=1),
    "system": _TEXT_OR_BLOCKS,
    "tools": _OBJECTS,
    "tool_choice": _OBJECT,
    "thinking": _OBJECT,
}
_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_REQUEST = Schema(
    type=OpenAPIType.OBJECT,
    required=["model", "max_tokens", "messages"],
    description="As Anthropic's API has it. Fields that are not listed here are passed on to the backend.",
    properties={
        **_PROMPT,
        "max_tokens": Schema(type=OpenAPIType.INTEGER, minimum=0),
        "stream": Schema(type=OpenAPIType.BOOLEAN, default=False),
        "stop_sequences": Schema(type=OpenAPIType.ARRAY, items=_STRING),
        "temperature": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=1),
        "metadata": Schema(
            type=OpenAPIType.OBJECT,
            properties={
                "user_id": Schema(
                    type=OpenAPIType.STRING,
                    max_length=512,
                    description="Your own user, for metering and limits of its own.",
                )
            },
        ),
    },
    examples=[{"model": "smollm2-135m-instruct", "max_tokens": 64, "messages": _MESSAGES}],
)
_COUNTED = Schema(
    type=OpenAPIType.OBJECT,
    required=["model", "messages"],
    properties={**_PROMPT},
    examples=[{"model": "smollm2-135m-instruct", "messages": _MESSAGES}],
)
_COUNT = Schema(
    type=OpenAPIType.OBJECT,
    required=["input_tokens"],
    properties={"input_tokens": Schema(type=OpenAPIType.INTEGER, minimum=0)},
)
ERROR = Schema(
    type=OpenAPIType.OBJECT,
    required=["type", "error"],
    properties={
        "type": Schema(type=OpenAPIType.STRING, enum=["error"]),
        "error": Schema(
            type=OpenAPIType.OBJECT, required=["type", "message"], properties={"type": _STRING, "message": _STRING}
        ),
        "request_id": _STRING,
    },
)
_ERRORS = {
    "400": "`invalid_request_error`: the request is not valid; the message names the field.",
    "401": "`authentication_error`: no API key, or one that is not valid.",
    "404": "`not_found_error`: the model does not exist, or this key may not use it.",
    "413": "`request_too_large`: the body is too large.",
    "429": "`rate_limit_error`: over a limit, see `retry-after`; `billing_error`: over a budget.",
    "503": "`overloaded_error`: no backend is up, or the gateway cannot reach its own services.",
}


def _header(name: str, description: str) -> Parameter:
    return Parameter(name=name, param_in="header", description=description, schema=_STRING)


@dataclass
class _Operation(Operation):
    """Adds body and answers."""

    body: ClassVar[Schema]
    answer: ClassVar[OpenAPIResponse]
    headers: ClassVar[list[Parameter]] = []

    def __post_init__(self) -> None:
        self.request_body = RequestBody(content={"application/json": OpenAPIMediaType(schema=self.body)}, required=True)
        self.parameters = [
            *(self.parameters or ()),
            _header("x-api-key", "The API key, unless it is sent as a bearer token."),
            *self.headers,
        ]
        errors = {
            status: OpenAPIResponse(description=text, content={"application/json": OpenAPIMediaType(schema=ERROR)})
            for status, text in _ERRORS.items()
        }
        self.responses = {"200": self.answer, **errors}


class MessagesOperation(_Operation):
    body = _REQUEST
    headers: ClassVar[list[Parameter]] = [
        _header("x-penstock-end-user", "Your own user; wins over `metadata.user_id`."),
        _header("x-penstock-tags", "Up to 10 tags for reports, as `team=blue, beta`."),
        _header("idempotency-key", "Requests that share it and all bytes of the body run once, within 24 hours."),
        *REQUEST_HEADERS,
    ]
    answer = OpenAPIResponse(
        description="A `message`; with `stream`, events from `message_start` to `message_stop`. An error in mid-stream "
        "is an `error` event, and nothing follows it.",
        content={
            "application/json": OpenAPIMediaType(schema=_OBJECT),
            "text/event-stream": OpenAPIMediaType(schema=_STRING),
        },
        headers=dict(ANSWER_HEADERS),
    )


class CountOperation(_Operation):
    body = _COUNTED
    answer = OpenAPIResponse(
        description="How many tokens the prompt has.", content={"application/json": OpenAPIMediaType(schema=_COUNT)}
    )
