"""A Messages request told as a chat completion.

References: https://docs.claude.com/en/api/messages and https://platform.openai.com/docs/api-reference/chat/create

Texts, images and inputs of tools are carried over as the JSON they came as, never decoded. What each field becomes:

- ``system`` is the first message. In a user's turn the results of tools come first, as messages of their own directly
  behind the calls; the images in them follow in the user's message, for a tool's message has only text. An error of a
  tool is marked by ``Error: ``.
- Thinking of earlier turns is dropped: chat completions take none.
- ``thinking`` with a budget becomes ``reasoning_effort``: low below 4,096 tokens, medium below 16,384, else high;
  ``output_config.effort`` wins over it, and without either nothing is said.
- A last message of the assistant's is to be gone on with: ``continue_final_message``, as vLLM and our worker call it.
- What only places caches or chooses among Anthropic's own services is dropped. Fields that Messages does not know go
  over as they are, but for those that would ask for more than was reserved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from gateway.ask import Body, given
from gateway.translation.content_blocks import (
    WRAPPED,
    Block,
    NotAChat,
    blocks_of,
    content_of,
    is_object,
    is_text,
    parts_of,
    text_of,
)

MAX_OBJECTS: Final = 100_000
"""With more braces than that, messages are not translated: each object in them becomes a Python object."""
MEDIUM_BUDGET: Final = 4096
HIGH_BUDGET: Final = 16384
_RENAMED: Final = {"stop_sequences": "stop"}
_TRANSLATED: Final = frozenset(
    (
        *("model", "messages", "system", "max_tokens", "stream", "stop_sequences"),
        *("tools", "tool_choice", "metadata", "thinking", "output_config", "output_format"),
    )
)
_DROPPED: Final = frozenset(
    (
        *("cache_control", "container", "context_management", "diagnostics", "inference_geo", "service_tier"),
        *("speed", "user_profile_id", "workspace_id", "betas"),
    )
)
"""Of Messages, without a counterpart."""
_NEVER: Final = frozenset(
    (
        *("n", "best_of", "max_completion_tokens", "stream_options", "stop", "user", "functions", "function_call"),
        *("parallel_tool_calls", "response_format", "reasoning_effort", "continue_final_message"),
        *("add_generation_prompt", "web_search_options"),
    )
)
"""Of chat completions: said by what is translated, or asking for more than was reserved."""
_NOTHING: Final = frozenset((b"null", b"[]", b"{}"))
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class _Message(msgspec.Struct):
    role: str
    content: msgspec.Raw


class _Tool(msgspec.Struct):
    name: msgspec.Raw = msgspec.Raw(b"null")
    type: str | None = None
    description: msgspec.Raw = msgspec.Raw(b"null")
    input_schema: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: str
    name: msgspec.Raw = msgspec.Raw(b"null")
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | float | None = None


class _Format(msgspec.Struct):
    type: str
    schema: msgspec.Raw = msgspec.Raw(b"null")


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: _Format | None = None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


_messages_decoder = msgspec.json.Decoder(list[_Message])
_tools_decoder = msgspec.json.Decoder(list[_Tool])
_input_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def chat_from_messages(body: Body) -> Body:
    """``body``: the fields of a Messages request. Raises NotAChat."""
    try:
        return _chat(body)
    except RecursionError:
        raise NotAChat("is nested too deeply") from None


def _chat(body: Body) -> Body:
    if given(body, "mcp_servers") and bytes(body["mcp_servers"]) not in _NOTHING:
        raise NotAChat("has 'mcp_servers', which Anthropic's own service calls")
    chat: Body = {
        name: value
        for name, value in body.items()
        if name not in _TRANSLATED and name not in _DROPPED and name not in _NEVER and name != "mcp_servers"
    }
    messages = _messages(body)
    chat["model"] = body["model"]
    chat["messages"] = _raw(messages)
    for field in ("max_tokens", "stream"):
        if given(body, field):
            chat[field] = body[field]
    if bytes(body.get("stream", b"")) == b"true":
        chat["stream_options"] = msgspec.Raw(b'{"include_usage":true}')
    for theirs, ours in _RENAMED.items():
        if given(body, theirs) and bytes(body[theirs]) not in _NOTHING:
            chat[ours] = body[theirs]
    if messages[-1].get("role") == "assistant" and "tool_calls" not in messages[-1]:
        chat["add_generation_prompt"] = msgspec.Raw(b"false")
        chat["continue_final_message"] = msgspec.Raw(b"true")
    _put_tools(body, chat)
    _put_output(body, chat)
    user = _field(body, "metadata", _Metadata)
    if user is not None and user.user_id:
        chat["user"] = _raw(user.user_id)
    return chat


def _messages(body: Body) -> list[dict[str, Any]]:
    raw = bytes(body["messages"])
    if raw.count(b"{") > MAX_OBJECTS:
        raise NotAChat(f"has over {MAX_OBJECTS} braces in its 'messages'")
    try:
        messages = _messages_decoder.decode(raw)
    except msgspec.DecodeError as fault:
        raise NotAChat(f"has 'messages' that cannot be read: {fault}") from None
    out: list[dict[str, Any]] = []
    if given(body, "system"):
        content = content_of(body["system"], "system")
        if content != []:
            out.append({"role": "system", "content": content})
    for at, message in enumerate(messages):
        where = f"messages[{at}].content"
        if message.role == "user":
            out += _user(message.content, where)
        elif message.role == "assistant":
            out.append(_assistant(message.content, where))
        elif message.role == "system":
            out.append({"role": "system", "content": content_of(message.content, where)})
        else:
            raise NotAChat(f"has a role in 'messages[{at}]' that is not 'user', 'assistant' or 'system'")
    return out


def _user(content: msgspec.Raw, where: str) -> Iterable[dict[str, Any]]:
    """The results of tools, then everything else."""
    if is_text(content):
        return [{"role": "user", "content": content}]
    results: list[dict[str, Any]] = []
    media: list[dict[str, Any]] = []
    said: list[Block] = []
    for at, block in enumerate(blocks_of(content, where)):
        if block.type == "tool_result":
            results.append(_tool_result(block, f"{where}[{at}]", media))
        else:
            said.append(block)
    parts = [*media, *parts_of(said, where)]
    if parts:
        results.append({"role": "user", "content": _alone(parts)})
    return results or [{"role": "user", "content": ""}]


def _tool_result(block: Block, where: str, media: list[dict[str, Any]]) -> dict[str, Any]:
    """Its message. What is no text in it is added to ``media``."""
    if not is_text(block.tool_use_id):
        raise NotAChat(f"has no 'tool_use_id' in '{where}'")
    content: Any
    if is_text(block.content):
        content = block.content
    elif bytes(block.content) == b"null":
        content = msgspec.Raw(b'""')
    else:
        parts = list(parts_of(blocks_of(block.content, f"{where}.content"), f"{where}.content"))
        texts = [part for part in parts if part["type"] == "text"]
        if len(texts) < len(parts):
            note = msgspec.Raw(b'"(What is no text in this result follows in the user\'s message.)"')
            texts.append({"type": "text", "text": note})
            media += [{"type": "text", "text": text_of(b'"Of the result of "', block.tool_use_id, b'":"')}]
            media += [part for part in parts if part["type"] != "text"]
        content = _alone(texts) if texts else msgspec.Raw(b'""')
    if block.is_error is True:
        content = _marked(content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _marked(content: Any) -> Any:
    if isinstance(content, list):
        return [{"type": "text", "text": "Error:"}, *content]
    if bytes(content)[1:6].lower() == b"error":
        return content
    return text_of(b'"Error: "', content)


def _assistant(content: msgspec.Raw, where: str) -> dict[str, Any]:
    if is_text(content):
        return {"role": "assistant", "content": content}
    said: list[Block] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks_of(content, where)):
        if block.type == "tool_use":
            calls.append(_call(block, f"{where}[{at}]"))
        elif block.type not in ("thinking", "redacted_thinking"):
            said.append(block)
    parts = list(parts_of(said, where))
    if any(part["type"] != "text" for part in parts):
        raise NotAChat(f"has more than text and calls in '{where}'")
    message: dict[str, Any] = {"role": "assistant", "content": _alone(parts) if parts else None if calls else ""}
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, where: str) -> dict[str, Any]:
    if not is_text(block.id) or not is_text(block.name) or not is_object(block.input):
        raise NotAChat(f"has no 'id', 'name' and 'input' in '{where}'")
    arguments = bytes(block.input).decode()
    if WRAPPED in arguments:
        wrapped = _decoded_input(block.input).get(WRAPPED)
        if wrapped is not None and is_text(wrapped) and len(_decoded_input(block.input)) == 1:
            return _function_call(block, wrapped)
    return _function_call(block, arguments)


def _function_call(block: Block, arguments: msgspec.Raw | str) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _decoded_input(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    try:
        return _input_decoder.decode(raw)
    except msgspec.DecodeError:
        return {}


def _put_tools(body: Body, chat: Body) -> None:
    if not given(body, "tools") or bytes(body["tools"]) in _NOTHING:
        return
    if bytes(body["tools"]).count(b"{") > MAX_OBJECTS:
        raise NotAChat(f"has over {MAX_OBJECTS} braces in its 'tools'")
    try:
        tools = _tools_decoder.decode(body["tools"])
    except msgspec.DecodeError as fault:
        raise NotAChat(f"has 'tools' that cannot be read: {fault}") from None
    chat["tools"] = _raw([_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)])
    choice = _field(body, "tool_choice", _ToolChoice)
    if choice is None:
        return
    if choice.type == "tool":
        if not is_text(choice.name):
            raise NotAChat("names no tool in 'tool_choice'")
        chat["tool_choice"] = _raw({"type": "function", "function": {"name": choice.name}})
    elif choice.type in ("auto", "any", "none"):
        chat["tool_choice"] = _raw("required" if choice.type == "any" else choice.type)
    else:
        raise NotAChat("has a 'tool_choice' of a type that is not 'auto', 'any', 'tool' or 'none'")
    if choice.disable_parallel_tool_use and choice.type != "none":
        chat["parallel_tool_calls"] = msgspec.Raw(b"false")


def _tool(tool: _Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise NotAChat(f"has a tool of type {tool.type[:64]!r}, which only Anthropic's own models and services know")
    if not is_text(tool.name):
        raise NotAChat(f"has no 'name' in '{where}'")
    function: dict[str, Any] = {"name": tool.name}
    if is_text(tool.description):
        function["description"] = tool.description
    if is_object(tool.input_schema):
        function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _put_output(body: Body, chat: Body) -> None:
    """How much to think, and the form of the text."""
    thinking = _field(body, "thinking", _Thinking)
    config = _field(body, "output_config", _OutputConfig) or _OutputConfig()
    if config.effort is not None:
        chat["reasoning_effort"] = _raw(_EFFORTS.get(config.effort, config.effort))
    elif thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        budget = thinking.budget_tokens
        effort = "low" if budget < MEDIUM_BUDGET else "medium" if budget < HIGH_BUDGET else "high"
        chat["reasoning_effort"] = _raw(effort)
    form = config.format or _field(body, "output_format", _Format)
    if form is None:
        return
    if form.type != "json_schema" or not is_object(form.schema):
        raise NotAChat("has an output format that is not of type 'json_schema' with a 'schema'")
    schema = {"name": "answer", "schema": form.schema, "strict": True}
    chat["response_format"] = _raw({"type": "json_schema", "json_schema": schema})


def _field(body: Body, field: str, kind: type[Any]) -> Any:
    if not given(body, field):
        return None
    try:
        return msgspec.json.decode(body[field], type=kind)
    except msgspec.DecodeError as fault:
        raise NotAChat(f"has a {field!r} that cannot be read: {fault}") from None


def _alone(parts: list[dict[str, Any]]) -> Any:
    """One text stands without a list around it, for templates that know no lists."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
