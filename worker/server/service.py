"""The model that a worker serves: hands prompts to its engine, and makes one answer of the choices that come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from worker.engine.client import (
    ControlRefused,
    EngineClient,
    EngineDead,
    EngineError,
    EngineStopped,
    Generation,
    GrammarFailed,
    QueueFull,
    QueueTimeout,
    RequestRejected,
)
from worker.engine.messages import EngineRequest
from worker.protocol.errors import (
    ApiError,
    bad_request,
    context_length_exceeded,
    model_not_found,
    overloaded,
    server_error,
)
from worker.server.call import Call
from worker.server.chat_template import ChatTemplate
from worker.server.tokenizer import Tokenizer
from worker.server.tools import tool_format_of

LONG_TEXT: Final = 16_384
"""Bytes of text from which a prompt is templated and tokenised in a thread: about 2 ms of work."""


class ModelService:
    """One model: its engine, its template and tokenizer, and the name that requests ask for it by."""

    def __init__(
        self, engine: EngineClient, template: ChatTemplate, name: str, *, tool_format: str | None = None
    ) -> None:
        """``tool_format``: how the model writes tool calls, one of ``FORMAT_NAMES``; None: guessed from the template.

        Raises ValueError for an unknown one.
        """
        self.engine = engine
        self.template = template
        self.name = name
        self.tool_format = tool_format_of(template.source, tool_format, template.tokenizer.special_tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.template.tokenizer

    @property
    def context(self) -> int:
        """Most tokens of prompt and output together."""
        return self.engine.info.max_model_len

    def check_name(self, model: str) -> None:
        """Raises ApiError (404) if ``model`` is another."""
        if model != self.name:
            raise model_not_found(model)

    def check_count(self, sequences: int, param: str) -> None:
        """Refuse more sequences than the engine could ever hold. ``param``: the field to shorten.

        Raises ApiError (400).
        """
        if sequences > self.engine.max_open:
            raise bad_request(
                f"This request makes {sequences} sequences, prompts times choices; this worker takes at most "
                f"{self.engine.max_open} at once. Send it in parts.",
                param=param,
                code="invalid_value",
            )

    async def submit(self, requests: Sequence[EngineRequest], *, progress: bool) -> list[Generation]:
        """Hand all of ``requests`` to the engine, or none. Raises ApiError. The caller must close what it gets.

        ``progress``: whether outputs without tokens come too.
        """
        begun: list[Generation] = []
        try:
            await self.engine.ensure_awake()
            for request in requests:
                begun.append(self.engine.generate(request, progress=progress))
        except EngineError as fault:
            for generation in begun:
                await generation.aclose()
            raise engine_fault(fault) from fault
        return begun

    def room_after(self, prompt_tokens: int, *, what: str, param: str) -> int:
        """Tokens that fit after a prompt. ``what``: what makes the prompt, for messages. Raises ApiError (400)."""
        room = self.context - prompt_tokens
        if room < 1:
            raise context_length_exceeded(
                f"This model's context is {self.context} tokens, but the {what} {prompt_tokens} tokens and leave no "
                f"room for an answer. Shorten the {param}.",
                param=param,
            )
        return room

    def max_tokens(
        self, prompt_tokens: int, wanted: int | None, call: Call, *, what: str, param: str, field: str
    ) -> int:
        """How many tokens to generate: ``wanted``, or all that fit. Raises ApiError (400).

        ``what`` makes the prompt, ``param`` is the field that it came from, ``field`` that of ``wanted``.
        """
        room = self.room_after(prompt_tokens, what=what, param=param)
        if wanted is None or (call.clamp_output and wanted > room):
            return room
        if wanted > room:
            raise context_length_exceeded(
                f"This model's context is {self.context} tokens, but the {what} {prompt_tokens} tokens and {field!r} "
                f"is {wanted}, together {prompt_tokens + wanted}. Shorten the {param}, or set {field!r} to at most "
                f"{room}.",
                param=field,
            )
        return wanted

    def check_text_size(self, size: int, what: str, param: str) -> None:
        """Refuse text that is too long whatever its tokens are, before time is spent on counting them.

        ``size`` in bytes of UTF-8. Raises ApiError (400).
        """
        if size > self.context * self.tokenizer.longest_token:
            raise context_length_exceeded(
                f"This model's context is {self.context} tokens, and the {what}, {size} bytes of text, is far longer. "
                "Shorten it.",
                param=param,
            )


def engine_fault(fault: EngineError, grammar_field: str | None = None) -> ApiError:
    """How an engine's refusal or end is told to the one who asked. ``grammar_field``: where the grammar came from."""
    if isinstance(fault, (QueueFull, QueueTimeout)):
        return overloaded(str(fault))
    if isinstance(fault, GrammarFailed):
        return bad_request(str(fault), param=grammar_field, code="invalid_grammar")
    if isinstance(fault, RequestRejected):
        return bad_request(str(fault))
    if isinstance(fault, ControlRefused):
        return server_error(f"The worker can't be woken: {fault}", status=503, code="engine_asleep")
    if isinstance(fault, EngineStopped):
        return overloaded("The worker is stopping. Send the request again.", code="worker_stopping")
    if isinstance(fault, EngineDead):
        return server_error(
            "The worker's engine stopped while it worked on this request. Send the request again.", code="engine_dead"
        )
    return server_error("The worker's engine failed on this request. Send the request again.")


def out_of_time() -> ApiError:
    """For answers that are worth nothing in part."""
    return server_error(
        "The worker's time limit for a request was over before the whole prompt was computed. Send less at once.",
        status=504,
        code="request_timeout",
    )
