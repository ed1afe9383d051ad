"""A chat completion request in the words of Anthropic's Messages API.

What cannot be asked of it is refused, for its absence would be noticed; what only tunes is left out. docs/api.md lists
both. References: https://platform.claude.com/docs/en/api/messages,
https://platform.claude.com/docs/en/cli-sdks-libraries/libraries/openai-sdk
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.ask import Body, given
from gateway.translation.chat_fields import ANYTHING, OBJECT, read
from gateway.translation.messages_conversation import Conversation, conversation
from gateway.translation.messages_thinking import thinking
from gateway.translation.messages_tools import tools
from worker.protocol.errors import bad_request

MAX_USER_ID = 256
"""Characters of ``metadata.user_id``."""
CARRIED: Final = ("thinking", "top_k", "cache_control")
"""Fields that chat completions do not have and Messages do: for clients that know what stands behind."""


def messages_request(chat: Body, *, model: str, max_tokens: int, stream: bool) -> bytes:
    """Raises ApiError (400) that names the field, for what Messages cannot be asked."""
    _refuse(chat)
    talk = conversation(chat.get("messages", msgspec.Raw(b"[]")))
    request: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "messages": talk.messages}
    if talk.system:
        request["system"] = talk.system
    request |= tools(chat)
    if stops := _stops(chat):
        request["stop_sequences"] = stops
    request |= {field: chat[field] for field in CARRIED if given(chat, field)}
    output_config: dict[str, Any] = dict(_object(chat, "output_config"))
    if (schema := _schema(chat)) is not None:
        output_config["format"] = {"type": "json_schema", "schema": schema}
    request |= _thinking_and_sampling(chat, request, talk, output_config)
    if output_config:
        request["output_config"] = output_config
    if (user := _user(chat)) is not None:
        request["metadata"] = {"user_id": user}
    if stream:
        request["stream"] = True
    return msgspec.json.encode(request)


def _refuse(chat: Body) -> None:
    if _value(chat, "n") not in (None, 1):
        raise bad_request(
            "This model answers with one choice a request. Leave 'n' out, or send the request several times.", param="n"
        )
    for field in ("logprobs", "top_logprobs", "logit_bias", "web_search_options", "audio"):
        # 0, false and {} ask for nothing; web search is asked for by an empty object, too.
        if _value(chat, field) if field != "web_search_options" else given(chat, field):
            raise bad_request(f"This model has no '{field}'. Leave the field out, or ask another model.", param=field)
    modalities = _value(chat, "modalities")
    if modalities is not None and modalities != ["text"]:
        raise bad_request("This model answers in text only. Leave 'modalities' out.", param="modalities")


def _thinking_and_sampling(
    chat: Body, request: dict[str, Any], talk: Conversation, output_config: dict[str, Any]
) -> dict[str, Any]:
    """May add to ``output_config``."""
    sampling: dict[str, Any] = {}
    # The other API's defaults are this one's, and newer models refuse to be told even these together.
    temperature = _number(chat, "temperature", 2)
    if temperature is not None and temperature != 1:
        sampling["temperature"] = min(temperature, 1)
    top_p = _number(chat, "top_p", 1)
    if top_p is not None and top_p != 1:
        sampling["top_p"] = top_p
    effort = _value(chat, "reasoning_effort")
    if effort is None or "thinking" in request:
        return sampling
    forced = request.get("tool_choice", {}).get("type") in ("any", "tool")
    thought = thinking(
        effort, request["model"], max_tokens=request["max_tokens"], forced=forced, resumes=talk.ends_in_results
    )
    if thought.effort is not None:
        output_config.setdefault("effort", thought.effort)
    if thought.thinking is None:
        return sampling
    # Who thinks takes no sampling parameters.
    return {"thinking": thought.thinking} | (sampling if thought.thinking["type"] == "disabled" else {})


def _stops(chat: Body) -> list[str]:
    stop = _value(chat, "stop")
    stops = [stop] if isinstance(stop, str) else ([] if stop is None else stop)
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise bad_request("'stop' must be text or a list of texts.", param="stop")
    if not all(each.strip() for each in stops):
        raise bad_request(
            "This model cannot stop at white space alone. Leave such texts out of 'stop', or ask another model.",
            param="stop",
        )
    return stops


def _schema(chat: Body) -> msgspec.Raw | None:
    """That of ``response_format``; None: text will do."""
    form = _object(chat, "response_format")
    kind = _value(form, "type") if form else "text"
    if kind == "text":
        return None
    if kind == "json_schema":
        schema = _object(form, "json_schema", where="response_format.json_schema").get("schema")
        if schema is not None and bytes(schema).startswith(b"{"):
            return schema
        raise bad_request(
            "'response_format.json_schema.schema' must be a JSON Schema.", param="response_format.json_schema.schema"
        )
    if kind == "json_object":
        raise bad_request(
            "This model gives JSON by a schema only. Set 'response_format' to type 'json_schema', or leave it out and "
            "ask for JSON in the prompt.",
            param="response_format",
        )
    raise bad_request("'response_format.type' must be 'text' or 'json_schema'.", param="response_format.type")


def _user(chat: Body) -> str | None:
    for field in ("safety_identifier", "user"):
        user = _value(chat, field)
        if isinstance(user, str) and 0 < len(user) <= MAX_USER_ID:
            return user
    return None


def _number(chat: Body, field: str, most: int) -> float | None:
    value = _value(chat, field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise bad_request(f"'{field}' must be a number from 0 to {most}.", param=field)
    return value


def _object(body: Body, field: str, *, where: str | None = None) -> Body:
    return read(body[field], OBJECT, where or field) if given(body, field) else {}


def _value(body: Body, field: str) -> Any:
    return read(body[field], ANYTHING, field) if given(body, field) else None
