"""From tokens to text: incremental detokenising and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal, Protocol

from worker.engine.messages import FinishReason


class Detokenizer(Protocol):
    """What a TextStream needs of a tokenizer."""

    def decode_bytes(self, ids: list[int]) -> bytes:
        """The bytes of ``ids``, one token's after the other's; special tokens have none."""
        ...


class TextStream:
    """The text of one sequence, given out as its tokens arrive.

    What ``push`` returned, joined, is a prefix of the final text at all times and the final text at the end, however
    the tokens were cut into calls. It never holds half a character: bytes that are not UTF-8 become U+FFFD once no
    further byte could complete them. Text that may be the beginning of a stop string is held back until that is
    decided, and not a character more. The stop string that is complete first ends the text before it; of several
    complete at the same character, the longest. One that is complete before ``min_tokens`` tokens is no stop.
    """

    def __init__(
        self,
        tokenizer: Detokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        locate: bool = False,
    ) -> None:
        """``include_stop``: whether what ended the text belongs to it. ``locate``: whether to keep ``starts``."""
        if any(not text for text in stop):
            raise ValueError("a stop string is empty")
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_Matcher(text) for text in stop]
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._locate = locate
        self._held = ""
        self._decoded = 0
        self._released = 0
        self.completion_tokens = 0
        """Tokens pushed so far, up to and with the one that completed a stop; those after it do not count."""
        self.finish_reason: Literal["stop", "length"] | None = None
        """Set when the text is complete. On ``stop`` by a stop string, close the engine's iterator: it still runs."""
        self.stop_string: str | None = None
        """The stop string that ended the text, if one did."""
        self.starts: list[int] = []
        """Where in the text each token begins, in characters; not of a stop token that does not show."""
        self.shown_tokens = 0
        """How many of ``starts`` are certain to show in the text."""

    def push(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
    ) -> str:
        """The text that became certain with ``token_ids``; all that is left of it, once there is a finish reason.

        ``finish_reason`` and ``stop_token_id`` are the engine's: the last token is the stop token if there is one.
        """
        if self.finish_reason is not None:
            return ""
        hides_last = stop_token_id is not None and not self._include_stop
        text = self._take(token_ids[:-1] if hides_last else token_ids)
        if self.stop_string is None:
            self.completion_tokens += 1 if hides_last and token_ids else 0
            if finish_reason is not None:
                text += self._release(self._decoder.decode(b"", final=True))
        if self.stop_string is None and finish_reason is not None:
            text += self._held
            self._held = ""
            self.finish_reason = "length" if finish_reason == "length" else "stop"
        if self._locate:
            self._count_shown(len(text))
        return text

    def _take(self, token_ids: Sequence[int]) -> str:
        if not self._matchers and not self._locate:
            self.completion_tokens += len(token_ids)
            return self._decoder.decode(self._tokenizer.decode_bytes(list(token_ids)))
        pieces = []
        # Token by token: the count must end at the one that completes the stop.
        for token_id in token_ids:
            self.completion_tokens += 1
            self.starts.append(self._decoded)
            text = self._decoder.decode(self._tokenizer.decode_bytes([token_id]))
            self._decoded += len(text)
            pieces.append(self._release(text))
            if self.stop_string is not None:
                break
        return "".join(pieces)

    def _count_shown(self, released: int) -> None:
        self._released += released
        if self.finish_reason is not None and self.stop_string is None:
            self.shown_tokens = len(self.starts)
        while self.shown_tokens < len(self.starts) and self.starts[self.shown_tokens] < self._released:
            self.shown_tokens += 1

    def _release(self, text: str) -> str:
        """``text`` after what is held, less what must be held now; on a stop, all that stands before it."""
        if not self._matchers:
            return text
        for position, character in enumerate(text):
            complete = [m for m in self._matchers if m.advance(character)]
            if complete and self.completion_tokens >= self._min_tokens:
                stop = max((m.text for m in complete), key=len)
                end = len(self._held) + position + 1 - (0 if self._include_stop else len(stop))
                certain = (self._held + text)[:end]
                self._held = ""
                self.finish_reason = "stop"
                self.stop_string = stop
                return certain
        pending = self._held + text
        cut = len(pending) - max(m.pending for m in self._matchers)
        self._held = pending[cut:]
        return pending[:cut]


class _Matcher:
    """Finds one string in text that comes a character at a time (Knuth, Morris, Pratt)."""

    __slots__ = ("_fallback", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest end of the text so far that begins ``text``."""
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            if text[i] == text[length]:
                length += 1
            self._fallback[i] = length

    @property
    def pending(self) -> int:
        """Length of the end of the text so far that may become a stop yet."""
        return self._fallback[-1] if self.matched == len(self.text) else self.matched

    def advance(self, character: str) -> bool:
        """Take one character; whether ``text`` is complete with it."""
        matched = self.pending
        while matched and self.text[matched] != character:
            matched = self._fallback[matched - 1]
        if self.text[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(self.text)
