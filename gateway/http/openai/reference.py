"""What the API reference says of the chat endpoint, whose body Litestar does not see."""

from __future__ import annotations

from dataclasses import dataclass

from litestar.openapi.spec import (
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Operation,
    Parameter,
    RequestBody,
    Schema,
)

_STRING = Schema(type=OpenAPIType.STRING)
_MESSAGE = Schema(
    type=OpenAPIType.OBJECT,
    required=["role", "content"],
    properties={"role": Schema(type=OpenAPIType.STRING, examples=["user"]), "content": _STRING},
)
_REQUEST = Schema(
    type=OpenAPIType.OBJECT,
    required=["model", "messages"],
    description="Fields that are not listed here are passed on to the worker.",
    properties={
        "model": Schema(type=OpenAPIType.STRING, description="A name that `GET /v1/models` lists."),
        "messages": Schema(type=OpenAPIType.ARRAY, items=_MESSAGE, min_items=1),
        "stream": Schema(type=OpenAPIType.BOOLEAN, default=False),
        "stream_options": Schema(
            type=OpenAPIType.OBJECT,
            properties={
                "include_usage": Schema(
                    type=OpenAPIType.BOOLEAN, default=False, description="Send a last event with the usage."
                )
            },
        ),
        "max_tokens": Schema(
            type=OpenAPIType.INTEGER, minimum=1, description="Most tokens of output; the route's default, if left out."
        ),
        "max_completion_tokens": Schema(
            type=OpenAPIType.INTEGER, minimum=1, description="The newer name of `max_tokens`; it wins over the older."
        ),
        "temperature": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=2, default=1),
        "top_p": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=1, default=1),
        "seed": Schema(type=OpenAPIType.INTEGER),
        "stop": Schema(one_of=[_STRING, Schema(type=OpenAPIType.ARRAY, items=_STRING, max_items=16)]),
        "n": Schema(type=OpenAPIType.INTEGER, minimum=1, default=1),
        "user": Schema(
            type=OpenAPIType.STRING, max_length=512, description="Your own user, for metering and limits of its own."
        ),
        "safety_identifier": Schema(
            type=OpenAPIType.STRING, max_length=512, description="The newer name of `user`; it wins over the older."
        ),
    },
    examples=[
        {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "stream": True,
        }
    ],
)
ERROR = Schema(
    type=OpenAPIType.OBJECT,
    required=["error"],
    properties={
        "error": Schema(
            type=OpenAPIType.OBJECT,
            required=["message", "type", "param", "code"],
            properties={
                "message": _STRING,
                "type": _STRING,
                "param": Schema(one_of=[_STRING, Schema(type=OpenAPIType.NULL)]),
                "code": Schema(one_of=[_STRING, Schema(type=OpenAPIType.NULL)]),
            },
        )
    },
)
_ERRORS = {
    "400": "The request is not valid; `param` names the field.",
    "401": "No API key, or one that is not valid.",
    "404": "The model does not exist, or this key may not use it.",
    "408": "The body did not arrive in time.",
    "409": "The `idempotency-key` came before with another body.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON, or is compressed.",
    "429": "Over a limit (`rate_limit_exceeded`, see `retry-after`) or over a budget (`insufficient_quota`).",
    "503": "No worker is up, or the gateway cannot reach its own services. Try again as `retry-after` says.",
}


def _error(description: str) -> OpenAPIResponse:
    return OpenAPIResponse(description=description, content={"application/json": OpenAPIMediaType(schema=ERROR)})


def _header(name: str, description: str) -> Parameter:
    return Parameter(name=name, param_in="header", description=description, schema=_STRING)


@dataclass
class ChatOperation(Operation):
    """Adds body and answers."""

    def __post_init__(self) -> None:
        self.request_body = RequestBody(content={"application/json": OpenAPIMediaType(schema=_REQUEST)}, required=True)
        self.parameters = [
            *(self.parameters or ()),
            _header("x-penstock-end-user", "Your own user; wins over `user` and `safety_identifier`."),
            _header("x-penstock-tags", "Up to 10 tags for reports, as `team=blue, beta`."),
            _header("idempotency-key", "Requests that share it and all bytes of the body run once, within 24 hours."),
        ]
        self.responses = {
            "200": OpenAPIResponse(
                description="A `chat.completion`; with `stream`, events that each hold a `chat.completion.chunk`, then "
                "`[DONE]`. An error in mid-stream is an event that holds an `error`, and no `[DONE]` follows.",
                content={
                    "application/json": OpenAPIMediaType(schema=Schema(type=OpenAPIType.OBJECT)),
                    "text/event-stream": OpenAPIMediaType(schema=_STRING),
                },
            ),
            **{status: _error(description) for status, description in _ERRORS.items()},
        }
