"""A completion request's body, checked: every refusal names the field that is wrong and what would be right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from worker.protocol.completions import CompletionRequest
from worker.protocol.errors import bad_request
from worker.server.body import convert, decode, invalid, refuse_unsupported
from worker.server.inputs import Inputs, read_inputs
from worker.server.sampling_parameters import UNSUPPORTED, Drawing, read_drawing, read_stream

MAX_LOGPROBS: Final = 5
_DEFAULT_MAX_TOKENS: Final = 16
"""What OpenAI's API generates where nothing is said."""


@dataclass(frozen=True, slots=True)
class CompletionParameters:
    """A valid request."""

    model: str
    prompts: Inputs
    suffix: str
    """What is to come after the answer; empty: nothing."""
    add_special: bool
    echo: bool
    stream: bool
    include_usage: bool
    drawing: Drawing
    logprobs: bool
    tokens_as_ids: bool
    """Whether log-probabilities name tokens by their ids."""


def read_completion_parameters(body: bytes, vocab_size: int) -> CompletionParameters:
    """Decode and check a request body. Raises ApiError (400)."""
    fields = decode(body, "'model' and 'prompt'")
    refuse_unsupported(fields, UNSUPPORTED)
    request = convert(fields, CompletionRequest)
    stream, include_usage = read_stream(request)
    echo, suffix = bool(request.echo), request.suffix or ""
    logprobs = request.logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise invalid(f"'logprobs' must be between 0 and {MAX_LOGPROBS}.", "logprobs")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request(
            "'best_of' is not supported by this model's worker beside 'n'. Ask for 'n' choices and choose among them.",
            param="best_of",
            code="unsupported_parameter",
        )
    if request.max_tokens == 0 and not echo:
        raise invalid("'max_tokens' may be 0 only with 'echo': true.", "max_tokens")
    prompts = read_inputs(request.prompt, "prompt", vocab_size)
    if suffix and (echo or not isinstance(prompts[0], str)):
        raise invalid("'suffix' goes with prompts that are text, and not with 'echo'.", "suffix")
    drawing = read_drawing(
        request,
        vocab_size,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        least_tokens=0 if echo else 1,
    )
    if drawing.max_tokens is None:
        drawing = replace(drawing, max_tokens=_DEFAULT_MAX_TOKENS)
    return CompletionParameters(
        model=request.model,
        prompts=prompts,
        suffix=suffix,
        add_special=request.add_special_tokens is not False,
        echo=echo,
        stream=stream,
        include_usage=include_usage,
        drawing=drawing,
        logprobs=logprobs is not None,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
    )
