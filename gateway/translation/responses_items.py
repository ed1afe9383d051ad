"""Items of a Responses conversation as the messages of a chat completion.

Reasoning items are left out: chat completions have no place for them.
Reference: https://developers.openai.com/api/reference/resources/responses/methods/create
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.translation.responses_fields import NULL, unsupported
from worker.protocol.errors import ApiError, bad_request

_ROLES: Final = frozenset(("user", "assistant", "system", "developer"))
_TEXTS: Final = frozenset(("input_text", "output_text", "text"))


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    file_url: str | None = None
    file_data: str | None = None
    filename: str | None = None
    input_audio: msgspec.Raw = NULL


Content = str | list[Part]


class Item(msgspec.Struct):
    type: str | None = None
    """None: a message."""
    role: str | None = None
    content: msgspec.Raw = NULL
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: msgspec.Raw = NULL
    id: str | None = None


_item_decoder = msgspec.json.Decoder(Item)
_content_decoder = msgspec.json.Decoder(Content)


def messages_of(items: Sequence[msgspec.Raw], *, own: int) -> list[dict[str, Any]]:
    """``own``: index of the first item that stands in the request itself; errors count from there.

    Raises ApiError (400).
    """
    messages: list[dict[str, Any]] = []
    open_calls: set[str] = set()
    for index, raw in enumerate(items):
        place = f"input[{index - own}]" if index >= own else "previous_response_id"
        item = read_item(raw, place)
        if item.type in (None, "message"):
            messages.append(_message(item, place))
        elif item.type == "function_call":
            open_calls.add(_call(item, messages, place))
        elif item.type == "function_call_output":
            call_id = item.call_id or ""
            if call_id not in open_calls:
                raise bad_request(
                    f"No tool call found for function call output with call_id {call_id[:100]!r}. Send the "
                    "'function_call' item before it, or the 'previous_response_id' of the answer that holds it.",
                    param=place,
                )
            open_calls.discard(call_id)
            output = _parts(_content(item.output, f"{place}.output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif item.type != "reasoning":
            kind = item.type or ""
            raise unsupported(
                f"The item type {kind[:64]!r}",
                "Send messages, function calls and their outputs; leave out items of other tools.",
                f"{place}.type",
            )
    if open_calls:
        raise bad_request(f"No tool output found for function call {min(open_calls)[:100]!r}.", param="input")
    return messages


def read_item(raw: msgspec.Raw, place: str) -> Item:
    """Raises ApiError (400)."""
    try:
        return _item_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise _unreadable(place, fault, "an item: an object with 'role' and 'content', or with a 'type'") from None


def _content(raw: msgspec.Raw, place: str) -> Content:
    try:
        return _content_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise _unreadable(place, fault, "text, or a list of parts that each have a 'type'") from None


def _message(item: Item, place: str) -> dict[str, Any]:
    if item.role not in _ROLES:
        raise bad_request(f"'{place}.role' must be one of {', '.join(sorted(_ROLES))}.", param=f"{place}.role")
    content = _content(item.content, f"{place}.content")
    if item.role == "assistant" and not isinstance(content, str):
        return {"role": "assistant", "content": "".join(_said(part, place) for part in content)}
    return {"role": item.role, "content": _parts(content, f"{place}.content")}


def _said(part: Part, place: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in _TEXTS and part.text is not None:
        return part.text
    raise bad_request(
        f"'{place}.content' of an assistant must be 'output_text' or 'refusal' parts.", param=f"{place}.content"
    )


def _parts(content: Content, place: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{place}[{index}]") for index, part in enumerate(content)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _part(part: Part, place: str) -> dict[str, Any]:
    if part.type in _TEXTS and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == "input_image" and part.image_url is not None:
        detail = {} if part.detail is None else {"detail": part.detail}
        return {"type": "image_url", "image_url": {"url": part.image_url} | detail}
    if part.type == "input_file" and part.file_data is not None:
        name = {} if part.filename is None else {"filename": part.filename}
        return {"type": "file", "file": {"file_data": part.file_data} | name}
    if part.type == "input_audio" and part.input_audio != NULL:
        return {"type": "input_audio", "input_audio": part.input_audio}
    if part.file_id is not None or part.file_url is not None:
        field = "file_id" if part.file_id is not None else "file_url"
        raise unsupported(f"A {field!r}", "No files are kept here; send the file itself.", f"{place}.{field}")
    raise bad_request(
        f"'{place}' must be a part of the type 'input_text', 'input_image', 'input_file' or 'input_audio', with the "
        "field of that name that holds it.",
        param=place,
    )


def _call(item: Item, messages: list[dict[str, Any]], place: str) -> str:
    """Calls of one turn stand in one message, that of the text before them if there is one."""
    if not item.call_id or not item.name or item.arguments is None:
        raise bad_request(f"'{place}' must have 'call_id', 'name' and 'arguments'.", param=place)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)
    return item.call_id


def _unreadable(place: str, fault: Exception, what: str) -> ApiError:
    _, _, inside = str(fault).partition(" - at `$")
    place += inside.rstrip("`")
    return bad_request(f"'{place}' cannot be read. It must be {what}.", param=place)
