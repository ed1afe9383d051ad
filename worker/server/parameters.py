"""A chat request's body, checked: every refusal names the field that is wrong and what would be right."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from worker.engine.plan import SamplingParams
from worker.protocol.chat import ChatRequest
from worker.protocol.errors import bad_request

MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 1024
MAX_TOKENS: Final = (1 << 31) - 1
"""Most that ``max_tokens`` may say: far above every context, and a number that can be written out."""
_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in a request -> role in the template: ``developer`` is what newer clients call the system."""
_SEED_BITS: Final = 63
_GREEDY_BELOW: Final = 1e-5


def _is(*neutral: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


_NEUTRAL: Final[dict[str, Callable[[Any], bool]]] = {
    "tools": _is([]),
    "tool_choice": _is("none", "auto"),
    "functions": _is([]),
    "function_call": _is("none", "auto"),
    "logprobs": _is(False),
    "top_logprobs": _is(0),
    "prompt_logprobs": _is(0),
    "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
    "logit_bias": _is({}),
    "presence_penalty": _is(0),
    "frequency_penalty": _is(0),
    "repetition_penalty": _is(1),
    "top_k": _is(-1, 0),
    "min_p": _is(0),
    "min_tokens": _is(0),
    "best_of": _is(1),
    "use_beam_search": _is(False),
    "modalities": _is(["text"]),
    "audio": _is(),
    "prediction": _is(),
    "web_search_options": _is(),
    "structured_outputs": _is(),
    "guided_json": _is(),
    "guided_regex": _is(),
    "guided_choice": _is(),
    "guided_grammar": _is(),
    "chat_template": _is(),
    "stop_token_ids": _is([]),
    "bad_words": _is([]),
    "allowed_token_ids": _is(),
    "include_stop_str_in_output": _is(False),
    "add_generation_prompt": _is(True),
    "continue_final_message": _is(False),
    "truncate_prompt_tokens": _is(),
    "echo": _is(False),
}
"""Fields that would change the answer and that this worker can't obey, each with the values that ask for nothing.
They are refused by name; fields that are not known at all are ignored, as clients expect."""


class _Body(ChatRequest, kw_only=True):
    """What this worker reads of a body: the protocol's fields and those of its own."""

    ignore_eos: bool | None = None
    """Go on past the end of the answer until ``max_tokens``; for measurements."""


@dataclass(frozen=True, slots=True)
class ChatParameters:
    """A valid request. ``messages`` hold ``role`` and ``content`` (text) alone, as templates expect them."""

    model: str
    messages: list[dict[str, str]]
    stream: bool
    include_usage: bool
    max_tokens: int | None
    """None: as many as fit."""
    max_tokens_field: str
    """The field that ``max_tokens`` came from, for messages."""
    stop: list[str]
    sampling: SamplingParams
    ignore_eos: bool


def read_chat_parameters(body: bytes) -> ChatParameters:
    """Decode and check a request body. Raises ApiError (400)."""
    fields = _decode(body)
    for name, asks_nothing in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not asks_nothing(value):
            raise bad_request(
                f"This model's worker does not support {name!r}. Leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    try:
        request = msgspec.convert(fields, _Body)
    except msgspec.ValidationError as fault:
        raise _of_wrong_type(fault) from None

    if request.n not in (None, 1):
        raise bad_request(
            f"'n' is {request.n}, but this model's worker gives one choice a request. Leave 'n' out, or send the "
            "request several times.",
            param="n",
            code="unsupported_parameter",
        )
    stream = bool(request.stream)
    if request.stream_options is not None and not stream:
        raise bad_request("'stream_options' is allowed only with 'stream': true.", param="stream_options")
    return ChatParameters(
        model=request.model,
        messages=_messages(request.messages),
        stream=stream,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
        max_tokens=_max_tokens(request),
        max_tokens_field="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        stop=_stop(request.stop),
        sampling=_sampling(request),
        ignore_eos=bool(request.ignore_eos),
    )


def _decode(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError as fault:
        raise bad_request(f"The body is not valid JSON: {fault}.", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise bad_request("The body must be a JSON object with 'model' and 'messages'.", code="invalid_json")
    return fields


_FAULT: Final = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]+)`")


def _of_wrong_type(fault: msgspec.ValidationError) -> Exception:
    match = _FAULT.match(str(fault))
    assert match is not None
    what, path = match["what"], (match["path"] or "").replace("[...]", "")
    if missing := _MISSING.search(what):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return bad_request(f"The field {name!r} is missing.", param=name, code="missing_required_parameter")
    return bad_request(f"{path!r} is of the wrong type: {what}.", param=path or None, code="invalid_type")


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    if not messages:
        raise bad_request("'messages' is empty. Send at least one message.", param="messages", code="empty_array")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, str]:
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise bad_request(
            "This model's worker does not support tools: messages may not hold tool calls or their results.",
            param=f"{where}.{'role' if role in ('tool', 'function') else 'tool_calls'}",
            code="unsupported_parameter",
        )
    if not isinstance(role, str) or role not in _ROLES:
        raise bad_request(
            f"'{where}.role' is {_shown(role)}. It must be one of: {', '.join(_ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    return {"role": _ROLES[role], "content": _content(message.get("content"), role, f"{where}.content")}


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(content))
    raise bad_request(
        f"{where!r} must be text or a list of text parts.",
        param=where,
        code="missing_required_parameter" if content is None else "invalid_type",
    )


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(kind, str) and kind != "text":
        raise bad_request(
            f"{where!r} is of type {_shown(kind)}, but this model reads text alone.",
            param=where,
            code="unsupported_content_type",
        )
    raise bad_request(f'{where!r} must be {{"type": "text", "text": "..."}}.', param=where, code="invalid_type")


def _max_tokens(request: _Body) -> int | None:
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise bad_request(f"{name!r} must be at least 1.", param=name, code="invalid_value")
        if value is not None and value > MAX_TOKENS:
            raise bad_request(f"{name!r} must be at most {MAX_TOKENS}.", param=name, code="invalid_value")
    # Where a client sends both, the newer name counts.
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _stop(stop: str | list[str] | None) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_request(
            f"'stop' has {len(strings)} strings. At most {MAX_STOP_STRINGS} are allowed.",
            param="stop",
            code="invalid_value",
        )
    for text in strings:
        if not text:
            raise bad_request("'stop' holds an empty string.", param="stop", code="invalid_value")
        if len(text) > MAX_STOP_LENGTH:
            raise bad_request(
                f"'stop' holds a string of {len(text)} characters. At most {MAX_STOP_LENGTH} are allowed.",
                param="stop",
                code="invalid_value",
            )
    return strings


def _sampling(request: _Body) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    if not 0 <= temperature <= 2:
        raise bad_request(
            f"'temperature' is {temperature}. It must be between 0 and 2.", param="temperature", code="invalid_value"
        )
    top_p = 1.0 if request.top_p is None else request.top_p
    if not 0 < top_p <= 1:
        raise bad_request(f"'top_p' is {top_p}. It must be above 0 and at most 1.", param="top_p", code="invalid_value")
    if request.seed is None:
        seed = secrets.randbits(_SEED_BITS)
    elif -(1 << 63) <= request.seed < 1 << 64:
        seed = request.seed & ((1 << _SEED_BITS) - 1)
    else:
        raise bad_request("'seed' must be a whole number that fits into 64 bits.", param="seed", code="invalid_value")
    # Divided by less than this, logits overflow; the draw is greedy long before.
    return SamplingParams(temperature=0.0 if temperature < _GREEDY_BELOW else temperature, top_p=top_p, seed=seed)


def _shown(value: Any) -> str:
    """A value for a message: short, and quoted as JSON quotes it."""
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 60 else text[:57] + "..."
