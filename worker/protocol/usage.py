"""Token usage, and the meter: running usage that a worker tells the gateway while it generates.

On a request with ``x-penstock-meter: 1`` a worker answers with ``text/event-stream`` whatever ``stream`` says, and
writes a comment line ``: penstock-meter {"prompt_tokens":9,"completion_tokens":3}`` before each event, whenever
tokens were generated that show no text yet, and after each chunk of a long prompt, whose tokens count once they are
computed. The numbers are running totals: the last one counts. So an answer may fail after its head and before its
first event: by an error event, as in its midst. A whole answer
arrives as one ``data:`` event that holds the JSON body, unchanged, followed by ``data: [DONE]``. The gateway reads
the comments and drops them.
"""

from __future__ import annotations

import msgspec

METER_PREFIX = b"penstock-meter "


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request. ``cached_tokens`` are inside ``prompt_tokens``, as OpenAI counts them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class MeterReading(msgspec.Struct, frozen=True, omit_defaults=True):
    """Running totals of one request, all its choices together; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt tokens, those that the worker's cache held."""
    compute_us: int = 0
    """Device microseconds times ranks that its steps took."""


_decoder = msgspec.json.Decoder(MeterReading)


def encode_meter(reading: MeterReading) -> bytes:
    """The whole SSE comment line, newline included. It may stand before an event or alone."""
    return b": " + METER_PREFIX + msgspec.json.encode(reading) + b"\n"


def decode_meter(comment: bytes) -> MeterReading | None:
    """Read a comment (without its colon and the space after it); None when it is not a meter comment."""
    if not comment.startswith(METER_PREFIX):
        return None
    try:
        return _decoder.decode(comment[len(METER_PREFIX) :])
    except msgspec.DecodeError:
        return None
