"""Texts with personal data and secrets blacked out, whole or as a stream of pieces.

A long text is looked through in windows that overlap by more than the longest match, and where they lie depends on the
text alone, not on how it is cut into pieces: so a stream comes to the same as the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from gateway.redaction import contacts, custom, media, national_ids, payment, secrets
from gateway.redaction.documents import redact_json
from gateway.redaction.spans import Finder, Span, compiled, merged, widened

WINDOW: Final = 64 * 1024
"""Characters that are looked through at once."""
OVERLAP: Final = 16 * 1024
"""Of these, how many at the end are looked through again with what follows. A match is found if it is no longer."""
CONTEXT: Final = 256
"""Characters before a window that say what its first ones belong to."""

_RANKS: Final = (
    *(secrets.PRIVATE_KEY, secrets.API_KEY, secrets.TOKEN, secrets.SECRET, payment.IBAN, payment.CARD),
    *(national_ids.KIND, contacts.EMAIL, contacts.PHONE, media.DATA),
)
_RANK: Final = {kind: rank for rank, kind in enumerate(_RANKS)}
_FINDERS: Final[tuple[Finder, ...]] = (
    *(secrets.private_keys, secrets.api_keys, secrets.tokens, secrets.assigned, media.data_urls, contacts.emails),
    *(payment.ibans, national_ids.with_letters),
)
_NUMBER_FINDERS: Final[tuple[Finder, ...]] = (payment.cards, contacts.phones, national_ids.of_digits)
_RUN: Final = media.BASE64 + ".~"
_RUN_ENDS: Final = tuple(f"[{kind}]" for kind in (media.DATA, secrets.API_KEY, secrets.TOKEN, secrets.SECRET))
"""Kinds that may be longer than a window; they go on for as long as such characters do."""
_DIGITS: Final = r"[0-9](?:[ ().\-/]{0,3}[0-9]){5}"
_NUMBER = compiled(_DIGITS)
_LEAST: Final = 6
"""Bytes of the shortest that a built-in finder finds."""
_ANYTHING = compiled("|".join((_DIGITS, "[@]|;base64,", *secrets.MARKS, payment.IBAN_MARK, *national_ids.MARKS)))
"""Found wherever a built-in finder may find anything: most texts have nothing of it, and are looked through once."""


class Redactor:
    """Threads may share one; its counts alone are exact only where they do not."""

    def __init__(self, patterns: Sequence[custom.Pattern] = ()) -> None:
        """Raises ValueError for patterns that cannot be used."""
        self._custom = custom.compile_patterns(patterns)
        self.counts: Counter[str] = Counter()
        """Of what was blacked out since they were last cleared, by placeholder."""

    def text(self, text: str) -> str:
        if len(text) < WINDOW:
            return self.window(text, 0, None)[0]
        stream = StreamRedactor(self)
        return stream.feed(text) + stream.end()

    def json(self, body: bytes) -> bytes:
        """JSON with its texts blacked out, and numbers that are cards; its fields keep their names. What is no JSON is
        taken for text."""
        return redact_json(body, self.text, self.counts)

    def window(self, text: str, context: int, until: int | None) -> tuple[str, int]:
        """The text blacked out from ``context`` on, and where it stopped: at ``until``, or behind a match that lies
        across it; None: at the end."""
        data = text.encode(errors="surrogatepass")
        spans = self._spans(data)
        plain = data.isascii()
        first = context if plain else len(text[:context].encode(errors="surrogatepass"))
        stop = len(data)
        if until is not None:
            stop = until if plain else len(text[:until].encode(errors="surrogatepass"))
        if not spans:
            return text[context:until], len(text) if until is None else until
        out: list[bytes] = []
        at = first
        for start, end, kind in spans:
            if end <= first:
                continue
            if start >= stop:
                break
            out += (data[at : max(start, at)], b"[%b]" % kind.encode())
            self.counts[kind] += 1
            at = end
        stop = max(stop, at)
        out.append(data[at:stop])
        stopped = stop if plain else len(data[:stop].decode(errors="surrogatepass"))
        return b"".join(out).decode(errors="surrogatepass"), stopped

    def _spans(self, data: bytes) -> list[Span]:
        found: list[Span] = []
        if len(data) >= _LEAST and _ANYTHING.search(data) is not None:
            for finder in _FINDERS:
                found += finder(data)
            if _NUMBER.search(data) is not None:
                for finder in _NUMBER_FINDERS:
                    found += finder(data)
        for pattern in self._custom:
            found += pattern.find(data)
        if not data.isascii():
            # Finders look at bytes: what they find of a character is all of it.
            found = [widened(data, span) for span in found]
        return merged(found, lambda kind: _RANK.get(kind, -1)) if found else found


class StreamRedactor:
    """What comes in pieces, blacked out as ``Redactor.text`` does the whole.

    Not more than a window is held back, and nothing of a text is given before it is that long or has ended.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held: list[str] = []
        self._size = 0
        self._before = ""
        """What stood before that: context alone."""
        self._in_run = False
        """Whether a key or data that is blacked out already goes on."""

    def feed(self, text: str) -> str:
        self._held.append(text)
        self._size += len(text)
        if self._size < WINDOW:
            return ""
        whole = "".join(self._held)
        out: list[str] = []
        at = 0
        while len(whole) - at >= WINDOW:
            at = self._advance(whole, at, out)
        self._held = [whole[at:]]
        self._size = len(whole) - at
        return "".join(out)

    def end(self) -> str:
        text = self._before + "".join(self._held)
        context = len(self._before)
        if self._in_run:
            context = len(text) - len(text[context:].lstrip(_RUN))
        self._held, self._size, self._before, self._in_run = [], 0, "", False
        return self._redactor.window(text, context, None)[0]

    def _advance(self, whole: str, at: int, out: list[str]) -> int:
        """Takes one window from there; returns where the next begins."""
        window = whole[at : at + WINDOW]
        if self._in_run:
            rest = window.lstrip(_RUN)
            taken = len(window) - len(rest)
            if taken:
                self._before = window[max(taken - CONTEXT, 0) : taken]
            self._in_run = not rest
            if taken:
                return at + taken
        context = len(self._before)
        text, stopped = self._redactor.window(self._before + window, context, context + WINDOW - OVERLAP)
        out.append(text)
        stopped -= context
        self._in_run = stopped == WINDOW and text.endswith(_RUN_ENDS)
        self._before = (self._before + window[:stopped])[-CONTEXT:]
        return at + stopped
