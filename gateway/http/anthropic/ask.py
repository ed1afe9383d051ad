"""Reads a Messages request: what the gateway must know of it is checked here, the rest is the backend's.

Reference: https://docs.claude.com/en/api/messages
"""

from __future__ import annotations

from functools import partial
from typing import Final

from gateway.ask import Ask, Body, given
from gateway.http.openai.fields import (
    END_USER_HEADER,
    MAX_END_USER,
    check_messages,
    read_body,
    read_count,
    read_flag,
    read_model,
    read_object,
    read_tags,
    read_value,
)
from gateway.translation.chat_from_messages import chat_from_messages
from gateway.translation.content_blocks import NotAChat
from gateway.translation.messages_from_chat import MessagesFromChat
from worker.protocol.errors import bad_request

_LISTS: Final = ("tools", "stop_sequences", "mcp_servers")


def parse_messages(raw: bytes, *, end_user: str | None = None, tags: str | None = None, counting: bool = False) -> Ask:
    """``end_user``, ``tags``: what the headers of these names say. ``counting``: nothing is to be generated.

    Raises ApiError (400) that names the field and the remedy.
    """
    body = read_body(raw, "messages")
    model = read_model(body)
    check_messages(body)
    cap = None if counting else read_count(body, "max_tokens", least=0)
    if cap is None and not counting:
        raise bad_request("'max_tokens' must be given: the most tokens of the answer.", param="max_tokens")
    if given(body, "system") and bytes(body["system"])[:1] not in (b'"', b"["):
        raise bad_request("'system' must be text or a list of text blocks.", param="system")
    for field in _LISTS:
        if given(body, field) and not bytes(body[field]).startswith(b"["):
            raise bad_request(f"'{field}' must be a list.", param=field)
    chat, not_chat = _chat(body)
    return Ask(
        body=body,
        model=model,
        size=len(raw),
        stream=read_flag(body, "stream"),
        include_usage=True,
        choices=1,
        max_output_tokens=cap,
        end_user=_end_user(body, end_user),
        tags=read_tags(tags),
        raw=raw,
        api="messages",
        chat=chat,
        not_chat=not_chat,
        from_chat=partial(MessagesFromChat, model),
    )


def _chat(body: Body) -> tuple[Body | None, str]:
    try:
        return chat_from_messages(body), ""
    except NotAChat as fault:
        return None, str(fault)


def _end_user(body: Body, header: str | None) -> str | None:
    """The header wins over ``metadata.user_id``."""
    user_id = read_value(read_object(body, "metadata"), "user_id")
    if user_id is not None and not isinstance(user_id, str):
        raise bad_request("'metadata.user_id' must be text.", param="metadata.user_id")
    for what, value in ((f"The header '{END_USER_HEADER}'", header), ("'metadata.user_id'", user_id)):
        if value is not None and len(value) > MAX_END_USER:
            raise bad_request(f"{what} has {len(value)} characters. At most {MAX_END_USER} are allowed.")
    return header or user_id or None
