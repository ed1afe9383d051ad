"""How an answer is to be drawn and where it ends: what chats and completions say about it, checked."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Final

import msgspec

from worker.engine.messages import Grammar
from worker.engine.plan import SamplingParams
from worker.protocol.errors import bad_request
from worker.protocol.generation import GenerationRequest
from worker.server.body import Neutral, invalid, neutral, shown
from worker.server.structured import response_grammar

MAX_CHOICES: Final = 128
MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 1024
MAX_STOP_TOKENS: Final = 64
MAX_TOKENS: Final = (1 << 31) - 1
"""Most that ``max_tokens`` may say: far above every context, and a number that can be written out."""
_SEED_BITS: Final = 63
_GREEDY_BELOW: Final = 1e-5

UNSUPPORTED: Final[dict[str, Neutral]] = {
    "use_beam_search": neutral(False),
    "prompt_logprobs": neutral(0),
    "bad_words": neutral([]),
    "truncate_prompt_tokens": neutral(),
    "logits_processors": neutral([]),
    "prompt_embeds": neutral(),
}
"""Fields of every request for text that can't be obeyed, with what their neutral values are."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """How to draw each choice of an answer, and when its text ends."""

    choices: int
    """How many, of each prompt."""
    sampling: SamplingParams
    """Of the first choice; without a seed of the caller's and without stop tokens."""
    seed: int | None
    """The caller's; None: drawn anew for each prompt."""
    stop: list[str]
    stop_token_ids: list[int]
    """The caller's own, beside the model's end-of-sequence tokens."""
    ignore_eos: bool
    include_stop: bool
    """Whether what ended the text belongs to it."""
    show_special: bool
    """Whether special tokens show in the text."""
    max_tokens: int | None
    """None: as many as fit. 0: none, which only an echo may ask for."""
    max_tokens_field: str
    """The field that ``max_tokens`` came from, for messages."""
    grammar: Grammar | None
    """What the text must be."""
    grammar_field: str | None
    """The field that ``grammar`` came from, for messages."""

    def of_choice(self, index: int, seed: int, eos_token_ids: list[int]) -> SamplingParams:
        """What the engine is told of choice ``index`` of a prompt."""
        params = msgspec.structs.replace(self.sampling, seed=seed, choice=index)
        if params.min_tokens:
            params = msgspec.structs.replace(params, stop_token_ids=self.ends(eos_token_ids))
        return params

    def ends(self, eos_token_ids: list[int]) -> list[int]:
        """The tokens that end a sequence of this answer."""
        ends = self.stop_token_ids if self.ignore_eos else [*eos_token_ids, *self.stop_token_ids]
        return list(dict.fromkeys(ends))


def draw_seed() -> int:
    return secrets.randbits(_SEED_BITS)


def read_drawing(
    request: GenerationRequest,
    vocab_size: int,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    max_completion_tokens: int | None = None,
    least_tokens: int = 1,
) -> Drawing:
    """``least_tokens``: the least that ``max_tokens`` may say. Raises ApiError (400)."""
    max_tokens, field = _max_tokens(request, max_completion_tokens, least_tokens)
    min_tokens = request.min_tokens or 0
    if not 0 <= min_tokens <= MAX_TOKENS:
        raise invalid(f"'min_tokens' must be between 0 and {MAX_TOKENS}.", "min_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"'min_tokens' is {min_tokens}, above {field!r}, which is {max_tokens}.", "min_tokens")
    choices = 1 if request.n is None else request.n
    if not 1 <= choices <= MAX_CHOICES:
        raise invalid(f"'n' must be between 1 and {MAX_CHOICES}.", "n")
    allowed = request.allowed_token_ids
    if allowed is not None and not allowed:
        raise invalid(
            "'allowed_token_ids' is empty, so that no token could be drawn. Leave it out.", "allowed_token_ids"
        )
    temperature = _within(request.temperature, 1.0, 0, 2, "temperature")
    sampling = SamplingParams(
        # Divided by less than this, logits overflow; the draw is greedy long before.
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=_within(request.top_p, 1.0, 0, 1, "top_p", above=True),
        top_k=_top_k(request.top_k, vocab_size),
        min_p=_within(request.min_p, 0.0, 0, 1, "min_p"),
        repetition_penalty=_within(request.repetition_penalty, 1.0, 0, 10, "repetition_penalty", above=True),
        presence_penalty=_within(request.presence_penalty, 0.0, -2, 2, "presence_penalty"),
        frequency_penalty=_within(request.frequency_penalty, 0.0, -2, 2, "frequency_penalty"),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        allowed_token_ids=None if allowed is None else _token_ids(allowed, vocab_size, "allowed_token_ids"),
        min_tokens=min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    grammar = response_grammar(
        request.response_format,
        request.structured_outputs,
        guided_json=request.guided_json,
        guided_regex=request.guided_regex,
        guided_choice=request.guided_choice,
        guided_grammar=request.guided_grammar,
    )
    return Drawing(
        choices=choices,
        sampling=sampling,
        seed=_seed(request.seed),
        stop=_stop(request.stop),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab_size),
        ignore_eos=bool(request.ignore_eos),
        include_stop=bool(request.include_stop_str_in_output),
        show_special=request.skip_special_tokens is False,
        max_tokens=max_tokens,
        max_tokens_field=field,
        grammar=grammar,
        grammar_field=None if grammar is None else _grammar_field(request),
    )


def read_stream(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether the answer streams, and whether its usage is asked for. Raises ApiError (400)."""
    stream = bool(request.stream)
    options = request.stream_options
    if options is not None and not stream:
        raise bad_request("'stream_options' is allowed only with 'stream': true.", param="stream_options")
    return stream, options is not None and options.include_usage


def _grammar_field(request: GenerationRequest) -> str:
    """Which field asks for the grammar. A ``response_format`` beside another field asks for plain text."""
    names = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in names if getattr(request, name) is not None), "response_format")


def _within(value: float | None, default: float, low: float, high: float, name: str, *, above: bool = False) -> float:
    """``above``: whether ``low`` itself is outside."""
    if value is None:
        return default
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        bounds = f"above {low} and at most {high}" if above else f"between {low} and {high}"
        raise invalid(f"{name!r} is {shown(value)}. It must be {bounds}.", name)
    return float(value)


def _max_tokens(request: GenerationRequest, newer: int | None, least: int) -> tuple[int | None, str]:
    for name, value in (("max_tokens", request.max_tokens), ("max_completion_tokens", newer)):
        if value is not None and value < least:
            raise invalid(f"{name!r} must be at least {least}.", name)
        if value is not None and value > MAX_TOKENS:
            raise invalid(f"{name!r} must be at most {MAX_TOKENS}.", name)
    # Where a client sends both, the newer name counts.
    return (request.max_tokens, "max_tokens") if newer is None else (newer, "max_completion_tokens")


def _top_k(value: int | None, vocab_size: int) -> int:
    if value is None or value in (-1, 0):
        return 0
    if value < 1:
        raise invalid("'top_k' must be at least 1, or -1 or 0 for all tokens.", "top_k")
    return value if value < vocab_size else 0


def _seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not -(1 << 63) <= seed < 1 << 64:
        raise invalid("'seed' must be a whole number that fits into 64 bits.", "seed")
    return seed & ((1 << _SEED_BITS) - 1)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    read: dict[int, float] = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 9 and int(token) < vocab_size):
            raise invalid(
                f"'logit_bias' holds the key {shown(token)}. Its keys are token ids, 0 to {vocab_size - 1}.",
                "logit_bias",
            )
        if not -100 <= bias <= 100:
            raise invalid(
                f"'logit_bias' of token {token} is {shown(bias)}. It must be between -100 and 100.", "logit_bias"
            )
        read[int(token)] = float(bias)
    return read


def _token_ids(ids: list[int], vocab_size: int, name: str) -> list[int]:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(f"{name!r} holds {shown(token_id)}. Token ids are 0 to {vocab_size - 1}.", name)
    return ids


def _stop_token_ids(ids: list[int], vocab_size: int) -> list[int]:
    if len(ids) > MAX_STOP_TOKENS:
        raise invalid(f"'stop_token_ids' has {len(ids)} ids. At most {MAX_STOP_TOKENS} are allowed.", "stop_token_ids")
    return _token_ids(ids, vocab_size, "stop_token_ids")


def _stop(stop: str | list[str] | None) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid(f"'stop' has {len(strings)} strings. At most {MAX_STOP_STRINGS} are allowed.", "stop")
    for text in strings:
        if not text:
            raise invalid("'stop' holds an empty string.", "stop")
        if len(text) > MAX_STOP_LENGTH:
            raise invalid(
                f"'stop' holds a string of {len(text)} characters. At most {MAX_STOP_LENGTH} are allowed.", "stop"
            )
    return strings
