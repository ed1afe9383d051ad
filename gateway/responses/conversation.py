"""What is kept of a response: itself, and the conversation that it was made of, whole.

Each keeps all of it, not a link to the one before: whatever becomes of that one, and however long the conversation, one
row is read. A conversation is a list of items as the Responses API words them, each with an id.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, Final

import msgspec

_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class Origins(msgspec.Struct, frozen=True):
    """Whose a conversation is: by it, it is found when one of them is erased."""

    end_users: tuple[str, ...] = ()
    """Keyed hashes."""
    built_upon: tuple[str, ...] = ()
    """Ids of all earlier responses."""

    def after(self, response_id: str, end_user: str | None) -> Origins:
        """Of what is built upon that response, which has these."""
        end_users = self.end_users
        if end_user is not None and end_user not in end_users:
            end_users = (*end_users, end_user)
        return Origins(end_users, (*self.built_upon, response_id))


class Stored(msgspec.Struct):
    response: msgspec.Raw
    items: list[msgspec.Raw]
    """All that went into it, oldest first."""
    origins: Origins | None = None
    """None: nobody knows, since an earlier release stored it, or what it was built upon."""

    def conversation(self) -> list[msgspec.Raw]:
        """What a response that follows is to build upon."""
        output = _answer_decoder.decode(self.response).output
        return [*self.items, *output]


class _Answer(msgspec.Struct):
    output: list[msgspec.Raw]


_answer_decoder = msgspec.json.Decoder(_Answer)
_item_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def listed(earlier: Sequence[msgspec.Raw], items: Sequence[msgspec.Raw], hex_id: str) -> list[msgspec.Raw]:
    """The whole conversation, with input ``items`` as the API lists them: each with a type, and an id of its own;
    messages with a status and a list of parts.

    ``hex_id``: of the response. Ids that are missing, or came before, are made of it. The items were read before.
    """
    ids = {id_of(item) for item in earlier}
    found = list(earlier)
    for index, item in enumerate(items):
        found.append(_listed(item, f"{hex_id}i{index:04x}", ids))
        ids.add(id_of(found[-1]))
    return found


def id_of(item: msgspec.Raw) -> str:
    return _identified_decoder.decode(item).id


class _Identified(msgspec.Struct):
    id: str


_identified_decoder = msgspec.json.Decoder(_Identified)


def _listed(raw: msgspec.Raw, name: str, taken: Set[str]) -> msgspec.Raw:
    item: dict[str, Any] = dict(_item_decoder.decode(raw))
    kind = _text(item.get("type")) or "message"
    item["type"] = kind
    given = _text(item.get("id"))
    if given is None or given in taken:
        item["id"] = f"{_PREFIXES.get(kind, 'item')}_{name}"
    if kind == "message":
        item.setdefault("status", "completed")
        content = _text(item.get("content"))
        if content is not None:
            said = _text(item.get("role")) == "assistant"
            part: dict[str, Any] = {"type": "output_text" if said else "input_text", "text": content}
            item["content"] = [part | ({"annotations": []} if said else {})]
    return msgspec.Raw(msgspec.json.encode(item))


def _text(value: msgspec.Raw | None) -> str | None:
    """The text that it is, if it is one."""
    if value is None or not bytes(value).startswith(b'"'):
        return None
    return msgspec.json.decode(value, type=str)
