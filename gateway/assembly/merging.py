"""Values that are told piece by piece: texts grow, lists grow, objects are merged, of others the last counts."""

from __future__ import annotations

import sys
from typing import Any, Final

from gateway.backends.lenient_json import encoded

TOLD_ONCE: Final = frozenset(("id", "type", "role", "object", "format", "model"))
"""Texts that pieces may repeat whole."""
MOST_DEPTH: Final = 16
"""What lies deeper is not merged: the last counts."""


class Text(list[str]):
    """Pieces of a text, joined when it is wanted."""


class Indexed(dict[int, Any]):
    """Members of a list that are told piece by piece, by their index."""


class Room:
    """How much may still be kept. Bytes, as far as texts go; of other values as many as they take as JSON."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.over = False
        """Whether something had to be left out."""

    def fitting(self, text: str) -> str:
        """As much of the text as there is room for, counted in UTF-8."""
        size = len(text) if text.isascii() else len(text.encode(errors="replace"))
        if size <= self.left:
            self.left -= size
            return text
        text = text.encode(errors="replace")[: max(self.left, 0)].decode(errors="ignore")
        self.left, self.over = 0, True
        return text

    def takes(self, value: object) -> bool:
        """Whether there is room for the whole value."""
        return self.takes_bytes(size_of(value))

    def takes_bytes(self, size: int) -> bool:
        if size > self.left:
            self.left, self.over = 0, True
            return False
        self.left -= size
        return True


def size_of(value: object) -> int:
    """Bytes that it takes as JSON; more than there ever is room for if it is nested too deeply to be written."""
    try:
        return len(encoded(value))
    except RecursionError:
        return sys.maxsize


def written(whole: dict[str, Any]) -> bytes | None:
    """JSON of it; None if it is nested too deeply."""
    try:
        return encoded(whole)
    except RecursionError:
        return None


class Merged(dict[str, Any]):
    """An object of which pieces may still come."""


def merge(whole: Merged, piece: dict[str, Any], room: Room, depth: int = 0) -> None:
    for name, value in piece.items():
        kind = type(value)
        if kind is str:
            if name not in TOLD_ONCE:
                grow(whole, name, value, room)
            elif not whole.get(name):
                whole[name] = room.fitting(value)
        elif value is None:
            whole.setdefault(name, None)
        elif room.over:
            continue
        elif kind is list:
            before = whole.get(name)
            if type(before) is not Indexed and (type(before) is not list or not before):
                before = whole[name] = Indexed() if _is_indexed(value) else []
            extend(before, value, room, depth)
        elif kind is dict and depth < MOST_DEPTH:
            before = whole.get(name)
            if type(before) is not Merged:
                before = whole[name] = Merged()
            merge(before, value, room, depth + 1)
        elif room.takes(value):
            whole[name] = value


def grow(whole: Merged, name: str, text: str, room: Room) -> None:
    """Lets the text of that name grow."""
    if room.over:
        return
    before = whole.get(name)
    if type(before) is Text:
        before.append(room.fitting(text))
    else:
        whole[name] = Text((room.fitting(text),))


def extend(whole: list[Any] | Indexed, pieces: list[Any], room: Room, depth: int = 0) -> None:
    if isinstance(whole, list):
        if pieces and not room.over and room.takes(pieces):
            whole += pieces
        return
    for piece in pieces:
        index = piece.get("index") if type(piece) is dict else None
        if type(index) is not int:
            index = max(whole, default=-1) + 1
        member = whole.get(index)
        if type(piece) is not dict or depth >= MOST_DEPTH:
            if not room.over and room.takes(piece):
                whole[index] = piece
            continue
        if type(member) is not Merged:
            if room.over or not room.takes_bytes(2):
                continue
            member = whole[index] = Merged()
        merge(member, piece, room, depth + 1)


def settled(value: Any) -> Any:
    """The plain value. What was merged stays as it is."""
    kind = type(value)
    if kind is Text:
        return "".join(value)
    if kind is Indexed:
        return [settled(value[index]) for index in sorted(value)]
    if kind is Merged:
        return {name: settled(member) for name, member in value.items()}
    return value


def _is_indexed(pieces: list[Any]) -> bool:
    return any(type(piece) is dict and type(piece.get("index")) is int for piece in pieces)
