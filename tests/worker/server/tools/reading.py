"""How the tests of tool-call parsers feed text to them and read what comes back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from worker.server.tools import CallArguments, CallStart, Piece, Text, tool_format_of

NAMES = ("get_weather", "get_time", "f", "f.more-2")


def pieces_of(format_name: str, text: str, cuts: Iterable[int] = ()) -> list[Piece]:
    """What a parser makes of ``text``, pushed in parts that end at ``cuts``."""
    numbers = itertools.count()
    parser = tool_format_of("", format_name).parser(NAMES, lambda: f"call_{next(numbers)}")
    pieces: list[Piece] = []
    begin = 0
    for end in [*sorted(cuts), len(text)]:
        pieces += parser.push(text[begin:end])
        begin = end
    return pieces + parser.finish()


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbours of one kind joined: what must not depend on how the text was cut."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            found[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            found.append(piece)
    return found


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Name and arguments of each call. Indexes must count from 0, arguments follow their own start."""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case CallStart(index, call_id, name):
                assert index == len(calls)
                assert call_id == f"call_{index}"
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                assert text
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return calls


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def read(format_name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls, arguments decoded."""
    pieces = pieces_of(format_name, text)
    return text_of(pieces), [(name, json.loads(arguments)) for name, arguments in calls_of(pieces)]
