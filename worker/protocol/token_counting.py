"""How a worker's prompts are counted without asking it: ``GET /internal/tokenizer``, MessagePack, with the fleet token.

A gateway fetches it once per model fingerprint and then counts what it is about to send. Byte-level BPE over the
vocabulary gives the tokens of plain text; ``ChatForm`` says what the chat template puts around each message, and
``InputForm`` what becomes of a prompt that is no chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

PATH = "/internal/tokenizer"
MEDIA_TYPE = "application/vnd.msgpack"


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What stands around the text of a message: it makes ``tokens`` plus those of ``before + text + after``.

    What is counted together is cut off from the other messages by special tokens.
    """

    tokens: int
    before: str
    after: str


class ChatForm(msgspec.Struct, frozen=True, kw_only=True):
    """A chat template that treats each message alike, whatever its text: by role, in the first place and later.

    For messages that have a role and a text, which is not empty, and nothing else.
    """

    first: dict[str, Turn]
    later: dict[str, Turn]
    end_tokens: int
    """Of the beginning of the assistant's turn."""


class InputForm(msgspec.Struct, frozen=True, kw_only=True):
    """A text as completions and embeddings take it: special tokens that it spells are special."""

    special: list[str]
    """Texts of the special tokens, each of which makes one token."""
    prefix_tokens: int
    """What goes before a text, unless the request has ``add_special_tokens: false``."""
    gap_tokens: int
    """Around a prompt that has a ``suffix``, beside the prefix: they mark the gap."""


class TokenCounting(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[bytes]
    """By id, which is also the rank of its merge; empty for special tokens, which no plain text makes."""
    pattern: str
    """Regular expression (as ``tiktoken`` reads it) that cuts text into pieces before the merges."""
    form: ChatForm | None
    """None: the template is none whose prompts can be counted from outside."""
    request_tokens: int
    """Most tokens that the template adds to a request with one empty message, and ``message_tokens`` for each more."""
    message_tokens: int
    nested_tokens_per_byte: int
    """Most tokens that a byte of JSON in ``tools`` and ``tool_calls`` can become; 0: nobody knows."""
    inputs: InputForm | None = None
    """None: the worker does not tell; it may be older than the gateway."""


def ranks_of(tokens: Sequence[bytes]) -> Mapping[bytes, int]:
    """Merge ranks as ``tiktoken`` wants them. It needs all 256 bytes: those that the vocabulary lacks get ids past its
    end, by which they are noticed."""
    ranks = {token: at for at, token in enumerate(tokens) if token}
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    return ranks | {bytes([byte]): len(tokens) + at for at, byte in enumerate(missing)}


def encode_counting(counting: TokenCounting) -> bytes:
    return msgspec.msgpack.encode(counting)


_decoder = msgspec.msgpack.Decoder(TokenCounting)


def decode_counting(data: bytes) -> TokenCounting:
    """Raises ValueError."""
    return _decoder.decode(data)
