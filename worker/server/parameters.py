"""A chat request's body, checked: every refusal names the field that is wrong and what would be right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from worker.protocol.chat import ChatRequest
from worker.protocol.errors import bad_request
from worker.server.body import Neutral, convert, decode, invalid, neutral, refuse_unsupported
from worker.server.prompting import Prompting, read_prompting
from worker.server.sampling_parameters import UNSUPPORTED, Drawing, read_drawing, read_stream
from worker.server.tools import ToolUse, read_tools

MAX_TOP_LOGPROBS: Final = 20

_UNSUPPORTED: Final[dict[str, Neutral]] = UNSUPPORTED | {
    "functions": neutral([]),
    "function_call": neutral("none", "auto"),
    "best_of": neutral(1),
    "modalities": neutral(["text"]),
    "audio": neutral(),
    "prediction": neutral(),
    "web_search_options": neutral(),
    "chat_template": neutral(),
    "echo": neutral(False),
}


@dataclass(frozen=True, slots=True)
class ChatParameters:
    """A valid request."""

    model: str
    prompting: Prompting
    stream: bool
    include_usage: bool
    drawing: Drawing
    logprobs: bool
    tools: ToolUse


def read_chat_parameters(body: bytes, vocab_size: int) -> ChatParameters:
    """Decode and check a request body. Raises ApiError (400)."""
    fields = decode(body, "'model' and 'messages'")
    refuse_unsupported(fields, _UNSUPPORTED)
    request = convert(fields, ChatRequest)
    stream, include_usage = read_stream(request)
    drawing = read_drawing(
        request, vocab_size, logprobs=_logprobs(request), max_completion_tokens=request.max_completion_tokens
    )
    tools = read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    return ChatParameters(
        model=request.model,
        prompting=read_prompting(request.messages, request, tools),
        stream=stream,
        include_usage=include_usage,
        drawing=drawing,
        logprobs=bool(request.logprobs),
        tools=tools,
    )


def _logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise invalid(f"'top_logprobs' must be between 0 and {MAX_TOP_LOGPROBS}.", "top_logprobs")
    if request.logprobs:
        return top or 0
    if top:
        raise bad_request("'top_logprobs' is allowed only with 'logprobs': true.", param="top_logprobs")
    return None
