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
    r"(?:https?://|www\.).+|.+@.+\..+|.*[_{}\\|<>=^~#*+&@].*|--?[A-Za-z][\w-]*|[./~][\w./]+"
    r"|\W*\w+(?:\([^()]*\)|\[[^\[\]]*\])+\W*|[\W\d]*[A-Za-z]{2,}\.[A-Za-z]\w*(?:\.\w+)*\W*"
)
"""Of a piece between spaces."""
_LONGEST_PIECE: Final = 80
_SPACED_SIGN: Final = re.compile(r"(?<=[\w)]) [-/] (?=[\d(])|(?<=\d) - (?=\w)")
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

    def coded(piece: str) -> str:
        codes.append(piece)
        return f" {MARK}c{len(codes)}{MARK} "

    text = _SPACED_SIGN.sub(lambda sign: coded(sign.group().strip()), _QUOTED.sub(quoted, text))
    pieces = []
    for piece in text.split(" "):
        bare = piece.rstrip(".,;:!?")
        if bare == "&":
            pieces.append("and" + piece[1:])
        elif MARK not in piece and bare and (len(bare) > _LONGEST_PIECE or _CODE.fullmatch(bare)):
            pieces.append(coded(bare) + piece[len(bare) :])
        else:
            pieces.append(piece)
    rest = []
    for char in " ".join(pieces):
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
