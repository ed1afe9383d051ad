"""A Responses request: what it asks for, as the body of a chat completion, and what its answer will say of it.

Reference: https://developers.openai.com/api/reference/resources/responses/methods/create
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from gateway.ask import Body
from gateway.translation.responses_fields import NULL, encoded, read, take, unsupported
from gateway.translation.responses_items import Item, messages_of
from gateway.translation.responses_tools import put_text, put_tools
from worker.protocol.errors import bad_request

MAX_OBJECTS: Final = 100_000
"""Most opening braces of a body: so many objects there may be in it, and each becomes one of Python's."""
MAX_TOP_LOGPROBS: Final = 20
LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = frozenset(
    (
        LOGPROBS,
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    )
)
"""What may be asked for. Most of it belongs to tools that are not served, and never comes."""
_MOVED: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
    "n": None,
    "best_of": None,
}
"""Fields of chat completions, by what the Responses API has instead."""
_ELSEWHERE: Final = {
    "background": "Answers are not made in the background: leave 'background' out, or stream the answer.",
    "conversation": "Conversations are not kept by that name; use 'previous_response_id'.",
    "prompt": "Prompt templates are not kept here; send the text as 'instructions' and 'input'.",
}
_PAIRS: Final = 16
_Metadata = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[str, msgspec.Meta(max_length=512)]],
    msgspec.Meta(max_length=_PAIRS),
]


class _Reasoning(msgspec.Struct):
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    items: list[msgspec.Raw]
    """Its own input."""
    previous_response_id: str | None
    store: bool
    stream: bool
    max_output_tokens: int | None
    rest: Body
    """Of a chat completion, all but its messages."""
    instructions: str | None
    echo: Body
    """Fields that the answer repeats."""

    def chat(self, earlier: Sequence[msgspec.Raw]) -> Body:
        """The chat completion, behind an ``earlier`` conversation. Raises ApiError (400)."""
        messages = messages_of([*earlier, *self.items], own=len(earlier))
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise bad_request("'input' must hold something to be answered.", param="input")
        return self.rest | {"messages": encoded(messages)}


def read_request(body: Body) -> ResponsesRequest:
    """``body`` is used up. Raises ApiError (400) that names the field and the remedy."""
    if sum(bytes(value).count(b"{") for value in body.values()) > MAX_OBJECTS:
        raise bad_request(f"The body may hold at most {MAX_OBJECTS} objects. Send a shorter conversation.")
    for field, instead in _MOVED.items():
        if body.get(field, NULL) != NULL and not (instead is None and bytes(body[field]) == b"1"):
            hint = "Leave it out." if instead is None else f"In the Responses API, it is '{instead}'."
            raise bad_request(f"Unsupported parameter: '{field}'. {hint}", param=field, code="unsupported_parameter")
        body.pop(field, None)
    for field, remedy in _ELSEWHERE.items():
        value = body.pop(field, NULL)
        if value not in (NULL, msgspec.Raw(b"false")):
            raise unsupported(f"'{field}'", remedy, field)
    echo = {name: body[name] for name in _REPEATED if body.get(name, NULL) != NULL}
    stream = bool(take(body, "stream", bool, "true or false"))
    store = take(body, "store", bool, "true or false") is not False
    metadata = take(body, "metadata", _Metadata, f"at most {_PAIRS} pairs of short texts")
    cap = take(body, "max_output_tokens", Annotated[int, msgspec.Meta(ge=1)], "an integer of at least 1")
    previous = take(body, "previous_response_id", str, "the id of an earlier response")
    request = ResponsesRequest(
        items=_items(body.pop("input", NULL), needed=previous is None),
        previous_response_id=previous,
        store=store,
        stream=stream,
        max_output_tokens=cap,
        instructions=take(body, "instructions", str, "text"),
        rest=body,
        echo=echo | {"metadata": encoded(metadata or {}), "store": encoded(store)},
    )
    _rest_of(body, request)
    return request


_REPEATED: Final = (
    *("instructions", "max_output_tokens", "parallel_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "temperature", "text", "tool_choice"),
    *("tools", "top_logprobs", "top_p", "user"),
)


def _rest_of(body: Body, request: ResponsesRequest) -> None:
    """Put the fields that are left into the words of chat completions. Raises ApiError (400)."""
    put_tools(body, body.pop("tools", NULL), body.pop("tool_choice", NULL))
    put_text(body, body.pop("text", NULL))
    if "tools" not in body:
        body.pop("parallel_tool_calls", None)
    reasoning: _Reasoning | None = take(body, "reasoning", _Reasoning, "an object")
    if reasoning is not None and reasoning.effort is not None:
        body["reasoning_effort"] = encoded(reasoning.effort)
    _put_logprobs(body)
    take(body, "truncation", str, "'auto' or 'disabled'")
    take(body, "stream_options", dict[str, msgspec.Raw], "an object")
    take(body, "max_tool_calls", int, "an integer")  # of tools that run here, and there are none
    for field, value in (("stream", request.stream or None), ("max_tokens", request.max_output_tokens)):
        if value is not None:
            body[field] = encoded(value)
    if request.stream:
        body["stream_options"] = encoded({"include_usage": True})
    for field in [field for field, value in body.items() if value == NULL]:
        del body[field]


def _put_logprobs(body: Body) -> None:
    include = take(body, "include", list[str], "a list of names") or []
    for name in include:
        if name not in _INCLUDED:
            raise bad_request(
                f"'include' has {name[:100]!r}; it may have {', '.join(sorted(_INCLUDED))}.", param="include"
            )
    most = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
    top = take(body, "top_logprobs", most, f"an integer from 0 to {MAX_TOP_LOGPROBS}")
    if top or LOGPROBS in include:
        body["logprobs"] = msgspec.Raw(b"true")
        if top is not None:
            body["top_logprobs"] = encoded(top)


def _items(value: msgspec.Raw, *, needed: bool) -> list[msgspec.Raw]:
    """Raises ApiError (400)."""
    # Items first: a list of other things ends there, before each of them became a Python object.
    given = read(value, str | list[Item], "input", "text, or a list of items")
    if isinstance(given, str):
        return [encoded({"type": "message", "role": "user", "content": given})]
    if not given and needed:
        raise bad_request("'input' must be text, or a list with at least one item.", param="input")
    return msgspec.json.decode(value, type=list[msgspec.Raw] | None) or []
