"""How the texts of a replayed answer are cut: into several pieces, but not into thousands."""

from __future__ import annotations

from typing import Final

PIECE: Final = 32
"""Characters; about what a few tokens are."""
_LEAST: Final = 2
_FEW: Final = 8
"""Pieces of a short text, about: it, too, comes as a stream."""
MOST_PIECES: Final = 256


def pieces(text: str) -> list[str]:
    """None of an empty text. Cut between characters, after a space where one is near."""
    size = max(min(PIECE, -(-len(text) // _FEW)), _LEAST, -(-len(text) // MOST_PIECES))
    found, at = [], 0
    while at < len(text):
        end = min(at + size, len(text))
        space = text.rfind(" ", at + size // 2, end)
        if space >= 0 and end < len(text):
            end = space + 1
        found.append(text[at:end])
        at = end
    return found
