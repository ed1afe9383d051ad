"""What the API reference says of the endpoints for inference, whose bodies Litestar does not see."""

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
_INTEGER = Schema(type=OpenAPIType.INTEGER)
_OTHERS = "Fields that are not listed here are passed on to the backend."
_MODEL = Schema(type=OpenAPIType.STRING, description="A name that `GET /v1/models` lists.")
_END_USER: dict[str, Schema] = {
    "user": Schema(
        type=OpenAPIType.STRING, max_length=512, description="Your own user, for metering and limits of its own."
    ),
    "safety_identifier": Schema(
        type=OpenAPIType.STRING, max_length=512, description="The newer name of `user`; it wins over the older."
    ),
}
_GENERATION: dict[str, Schema] = {
    "stream": Schema(type=OpenAPIType.BOOLEAN, default=False),
    "stream_options": Schema(
        type=OpenAPIType.OBJECT,
        properties={
            "include_usage": Schema(
                type=OpenAPIType.BOOLEAN, default=False, description="Send a last event with the usage."
            )
        },
    ),
    "temperature": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=2, default=1),
    "top_p": Schema(type=OpenAPIType.NUMBER, minimum=0, maximum=1, default=1),
    "seed": _INTEGER,
    "stop": Schema(one_of=[_STRING, Schema(type=OpenAPIType.ARRAY, items=_STRING, max_items=16)]),
    "n": Schema(type=OpenAPIType.INTEGER, minimum=1, maximum=128, default=1),
    **_END_USER,
}
_IDS = Schema(type=OpenAPIType.ARRAY, items=_INTEGER, min_items=1)
_INPUTS = Schema(
    one_of=[
        _STRING,
        Schema(type=OpenAPIType.ARRAY, items=_STRING, min_items=1, max_items=2048),
        _IDS,
        Schema(type=OpenAPIType.ARRAY, items=_IDS, min_items=1, max_items=2048),
    ],
    description="A text, several texts, token ids, or several lists of token ids.",
)
_MESSAGE = Schema(
    type=OpenAPIType.OBJECT,
    required=["role", "content"],
    properties={"role": Schema(type=OpenAPIType.STRING, examples=["user"]), "content": _STRING},
)
_CHAT = Schema(
    type=OpenAPIType.OBJECT,
    required=["model", "messages"],
    description=_OTHERS,
    properties={
        "model": _MODEL,
        "messages": Schema(type=OpenAPIType.ARRAY, items=_MESSAGE, min_items=1),
        "max_tokens": Schema(
            type=OpenAPIType.INTEGER, minimum=1, description="Most tokens of output; the route's default, if left out."
        ),
        "max_completion_tokens": Schema(
            type=OpenAPIType.INTEGER, minimum=1, description="The newer name of `max_tokens`; it wins over the older."
        ),
        **_GENERATION,
    },
    examples=[
        {
            "model": "smollm2-135m-instruct",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "stream": True,
        }
    ],
)
_COMPLETION = Schema(
    type=OpenAPIType.OBJECT,
    required=["model", "prompt"],
    description=_OTHERS,
    properties={
        "model": _MODEL,
        "prompt": _INPUTS,
        "max_tokens": Schema(
            type=OpenAPIType.INTEGER, minimum=0, default=16, description="Of each choice. 0 goes only with `echo`."
        ),
        "best_of": Schema(type=OpenAPIType.INTEGER, minimum=1, maximum=128),
        "echo": Schema(type=OpenAPIType.BOOLEAN, default=False),
        "suffix": _STRING,
        "logprobs": Schema(type=OpenAPIType.INTEGER, minimum=0),
        **_GENERATION,
    },
    examples=[{"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 5}],
)
_EMBEDDING = Schema(
    type=OpenAPIType.OBJECT,
    required=["model", "input"],
    description=_OTHERS,
    properties={
        "model": _MODEL,
        "input": _INPUTS,
        "encoding_format": Schema(type=OpenAPIType.STRING, enum=["float", "base64"], default="float"),
        "dimensions": Schema(type=OpenAPIType.INTEGER, minimum=1),
        **_END_USER,
    },
    examples=[{"model": "smollm2-135m-instruct", "input": ["A penstock leads water.", "Into turbines."]}],
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
class _InferenceOperation(Operation):
    """Adds body and answers."""

    body: ClassVar[Schema]
    answer: ClassVar[str]
    streams: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.request_body = RequestBody(content={"application/json": OpenAPIMediaType(schema=self.body)}, required=True)
        self.parameters = [
            *(self.parameters or ()),
            _header("x-penstock-end-user", "Your own user; wins over `user` and `safety_identifier`."),
            _header("x-penstock-tags", "Up to 10 tags for reports, as `team=blue, beta`."),
            _header("idempotency-key", "Requests that share it and all bytes of the body run once, within 24 hours."),
            *REQUEST_HEADERS,
        ]
        content = {"application/json": OpenAPIMediaType(schema=Schema(type=OpenAPIType.OBJECT))}
        if self.streams:
            content["text/event-stream"] = OpenAPIMediaType(schema=_STRING)
        self.responses = {
            "200": OpenAPIResponse(description=self.answer, content=content, headers=dict(ANSWER_HEADERS)),
            **{status: _error(description) for status, description in _ERRORS.items()},
        }


def _streamed(whole: str, event: str) -> str:
    return (
        f"A `{whole}`; with `stream`, events that each hold a `{event}`, then `[DONE]`. An error in mid-stream is an "
        "event that holds an `error`, and no `[DONE]` follows."
    )


class ChatOperation(_InferenceOperation):
    body = _CHAT
    answer = _streamed("chat.completion", "chat.completion.chunk")


class CompletionOperation(_InferenceOperation):
    body = _COMPLETION
    answer = _streamed("text_completion", "text_completion")


class EmbeddingOperation(_InferenceOperation):
    body = _EMBEDDING
    answer = "A `list` of one `embedding` for each input, in order."
    streams = False
