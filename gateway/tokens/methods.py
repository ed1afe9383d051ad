"""Ways to count a prompt: OpenAI's, by its documented overhead, and our workers', by what they vouch for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from gateway.tokens.chat import Message, count_images, lies_elsewhere
from gateway.tokens.encoding import Encoding
from gateway.tokens.inputs import bytes_beside, text_of
from gateway.tokens.media import image_tokens
from worker.protocol.token_counting import TokenCounting, ranks_of

Body = Mapping[str, msgspec.Raw]
Messages = Sequence[Message | msgspec.Raw]
Count = Callable[[Encoding, str], int]

_NULL: Final = msgspec.Raw(b"null")
_EMPTY: Final = frozenset((b"null", b"[]", b"{}", b'""', b"false"))


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the backend's template may add, for bounds by bytes."""

    request_tokens: int = 256
    message_tokens: int = 32
    nested_tokens_per_byte: int = 1
    """Of the JSON in tools and their calls; 0: it has no bound."""


class Method(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def allowance(self) -> Allowance: ...

    def count(self, messages: Messages, body: Body, model: str, count: Count) -> int | None:
        """Most tokens of the prompt, exactly those it has where the chat is of a known form; None: this method can
        say nothing of such a chat. ``count``: tokens of a text, perhaps remembered.
        """
        ...

    def count_around(self, body: Body, count: Count, *, texts: bool) -> int | None:
        """Most tokens that are put to each prompt of what is no chat; ``texts``: they are texts, not token ids. None:
        this method can say nothing of them."""
        ...

    def count_text(self, text: str, count: Count) -> int:
        """Most tokens of a prompt that is a text, alone; special tokens that it spells may be special."""
        ...


class OpenAIMethod:
    """The counting that OpenAI documents: https://cookbook.openai.com/examples/how_to_count_tokens_with_tiktoken.

    What it says nothing of (tools, formats, calls, other media) counts by its bytes.
    """

    _PER_REQUEST: Final = 3
    _PER_MESSAGE: Final = 3
    _PER_NAME: Final = 1
    _PER_MORE_TEXT: Final = 1
    _GAP: Final = 3
    """Special tokens that mark where a completion goes, if it has something behind it."""
    _OUTSIDE: Final = frozenset(
        (
            *("model", "messages", "stream", "stream_options", "n", "seed", "stop", "user", "safety_identifier"),
            *("max_tokens", "max_completion_tokens", "temperature", "top_p", "logit_bias", "logprobs", "top_logprobs"),
            *("presence_penalty", "frequency_penalty", "parallel_tool_calls", "service_tier", "store", "metadata"),
            *("prompt_cache_key", "reasoning_effort", "verbosity", "modalities"),
        )
    )
    """Fields that put nothing into the prompt."""
    _FETCHED: Final = ("web_search_options",)

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self.name = encoding.name
        self.allowance = Allowance()

    def count(self, messages: Messages, body: Body, model: str, count: Count) -> int | None:
        if any(bytes(body.get(field, _NULL)) not in _EMPTY for field in self._FETCHED):
            return None
        total = self._PER_REQUEST
        for field, value in body.items():
            if field not in self._OUTSIDE and bytes(value) not in _EMPTY:
                total += self._PER_MESSAGE + len(bytes(value))
        for message in messages:
            found = self._message(message, model, count)
            if found is None:
                return None
            total += self._PER_MESSAGE + found
        return total

    def _message(self, message: Message | msgspec.Raw, model: str, count: Count) -> int | None:
        if not isinstance(message, Message):
            return self._by_bytes(bytes(message))
        total = count(self._encoding, message.role)
        if message.name is not None:
            total += self._PER_NAME + count(self._encoding, message.name)
        if isinstance(message.content, str):
            return total + count(self._encoding, message.content)
        for part in message.content or ():
            if part.type == "text" and part.text is not None and part.image_url is None:
                total += self._PER_MORE_TEXT + count(self._encoding, part.text)
            elif part.type == "image_url" and part.image_url is not None:
                total += image_tokens(model, low=part.image_url.detail == "low")
            else:
                return None
        return total

    def count_around(self, body: Body, count: Count, *, texts: bool) -> int | None:
        suffix = text_of(body, "suffix")
        if suffix is None:
            return None
        more = bytes_beside(body, but=("suffix",))
        return more + (self._GAP + self.count_text(suffix, count) if suffix else 0)

    def count_text(self, text: str, count: Count) -> int:
        # Which of the two a server does is nowhere said.
        special, pieces = self._encoding.cut(text)
        plain = count(self._encoding, text)
        return max(plain, special + sum(count(self._encoding, piece) for piece in pieces)) if special else plain

    def _by_bytes(self, message: bytes) -> int | None:
        alone = b"[" + message + b"]"
        return None if lies_elsewhere(alone) or count_images(alone) else len(message)


class WorkerMethod:
    """Our own worker's template and vocabulary, as it tells them."""

    _CHANGING: Final = ("tools", "continue_final_message", "chat_template_kwargs")
    """Fields with which the template may do anything."""

    def __init__(self, told: TokenCounting) -> None:
        """Takes some 50 ms of CPU time for 50,000 tokens. Raises EncodingUnusable."""
        digest = hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()[:16]
        self.name = f"backend:{digest}"
        self.allowance = Allowance(told.request_tokens, told.message_tokens, told.nested_tokens_per_byte)
        self._form = told.form
        self._inputs = told.inputs
        special = told.inputs.special if told.inputs is not None else ()
        self._encoding = Encoding(
            self.name, told.pattern, ranks_of(told.tokens), size=len(told.tokens), special=special
        )

    def count(self, messages: Messages, body: Body, model: str, count: Count) -> int | None:
        form = self._form
        if form is None or any(bytes(body.get(field, _NULL)) not in _EMPTY for field in self._CHANGING):
            return None
        total = form.end_tokens
        turns = form.first
        for message in messages:
            if not isinstance(message, Message) or message.name is not None:
                return None
            texts, turn = message.texts(), turns.get(message.role)
            text = "\n".join(texts) if texts else ""
            if turn is None or not text:
                return None
            total += turn.tokens + count(self._encoding, turn.before + text + turn.after)
            turns = form.later
        return total

    def count_around(self, body: Body, count: Count, *, texts: bool) -> int | None:
        form, suffix = self._inputs, text_of(body, "suffix")
        if form is None or suffix is None:
            return None
        if not texts:
            return 0
        if suffix:
            return form.prefix_tokens + form.gap_tokens + count(self._encoding, suffix)
        return 0 if bytes(body.get("add_special_tokens", _NULL)) == b"false" else form.prefix_tokens

    def count_text(self, text: str, count: Count) -> int:
        special, pieces = self._encoding.cut(text)
        return special + sum(count(self._encoding, piece) for piece in pieces)
