"""What must be the same to the letter: quoted text, code, addresses and signs; and the text without them."""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_QUOTED: Final = re.compile(
    r"```(?P<fence>.*?)```|`(?P<tick>[^`]+)`|\"(?P<double>[^\"]+)\"|«\s*(?P<angle>[^»]+?)\s*»"
    r"|(?<!\w)'(?P<single>[^'\n]+)'(?!\w)",
    re.DOTALL,
)
_CODE: Final = re.compile(
    r"(?:https?://|www\.)\S+|\S+@\S+\.\S+|\w+(?:\([^()\s]*\)|\[[^\[\]]*\])+|\S*[_{}\\|<>=^~#*+&@]\S*"
    r"|(?<!\S)--?[A-Za-z][\w-]*"
    r"|(?<![\w.])[A-Za-z]{2,}\.[A-Za-z]\w*(?:\.\w+)*|(?<!\S)[./~][\w./]+|(?<=[\w)]) [-/] (?=[\d(])|(?<=\d) - (?=\w)"
)
_PLAIN: Final = frozenset(" .,;:!?'-()/%$€£¥₹₩¢₽₺°¿¡\n\t…’")
_SUMS: Final = tuple(
    (re.compile(rf"(?<=\d) ?{sign} ?(?=\d+(?:[ ,.?]|$))"), f" {word} ")
    for sign, word in ((r"\+", "plus"), (r"[*×]", "times"), ("÷", "divided by"))
)
MARK: Final = "\ue000"
"""Stands for a quotation or a piece of code, followed by its kind and place and by another."""


def _tidy(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    for found, plain in (("“”„‟″", '"'), ("‘’‚‛′´", "'"), ("‐‑‒–—―−", "-")):
        for char in found:
            text = text.replace(char, plain)
    text = re.sub(r"\b(?:[A-Za-z]\.){2,}", lambda found: found.group().replace(".", "") + " ", text)
    for sign, word in _SUMS:
        text = sign.sub(word, text)
    return re.sub(r"[ \t]+", " ", text).strip()


def part(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """The text with a mark for each quotation and piece of code, the quotations, and the code and signs, in order."""
    text = _tidy(text)
    quotes: list[str] = []
    codes: list[str] = []

    def quoted(found: re.Match[str]) -> str:
        quotes.append(next(group for group in found.groups() if group is not None).strip())
        return f" {MARK}q{len(quotes)}{MARK} "

    def coded(found: re.Match[str]) -> str:
        piece = found.group().strip()
        end = re.search(r"[.,;:!?]*$", piece)
        tail = end.group() if end and len(end.group()) < len(piece) else ""
        if piece == "&":
            return " and "
        codes.append(piece.removesuffix(tail))
        return f" {MARK}c{len(codes)}{MARK} {tail}"

    text = _CODE.sub(coded, _QUOTED.sub(quoted, text))
    rest = []
    for char in text:
        if char.isalnum() or char in _PLAIN or char == MARK or unicodedata.category(char) == "Mn":
            rest.append(char)
        else:
            codes.append(char)
            rest.append(" ")
    return "".join(rest), tuple(quotes), tuple(codes)


def restored(text: str, quotes: tuple[str, ...], codes: tuple[str, ...]) -> str:
    """``text`` with what its marks stand for."""
    for kind, pieces in (("q", quotes), ("c", codes)):
        for at, piece in enumerate(pieces, 1):
            text = text.replace(f"{MARK}{kind}{at}{MARK}", f'"{piece}"' if kind == "q" else piece)
    return text
