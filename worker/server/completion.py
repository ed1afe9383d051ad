"""One chat request on its way through the worker: prompt, tokens, limits, and the text that comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from worker.engine.client import (
    EngineClient,
    EngineDead,
    EngineError,
    EngineStopped,
    Generation,
    QueueFull,
    RequestRejected,
)
from worker.engine.messages import EngineRequest
from worker.engine.output import TextStream
from worker.protocol.chat import FinishReason
from worker.protocol.errors import (
    ApiError,
    bad_request,
    context_length_exceeded,
    model_not_found,
    overloaded,
    server_error,
)
from worker.protocol.usage import MeterReading, Usage
from worker.server.chat_template import ChatTemplate, TemplateRefused
from worker.server.parameters import ChatParameters
from worker.server.tokenizer import UntokenizableText

_LONG_PROMPT: Final = 16_384
"""Bytes of text from which a prompt is templated and tokenised in a thread: about 2 ms of work."""
_MESSAGE_WORK: Final = 256
"""A message's own work, in bytes of text that take as long."""


@dataclass(frozen=True, slots=True)
class Call:
    """What came with a request besides its body. All but ``request_id`` is the gateway's to say."""

    request_id: str
    salt: str = ""
    priority: int = 0
    clamp_output: bool = False
    """Whether ``max_tokens`` is a default, to be shortened to what fits."""
    metered: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """What a completion gained: ``text`` (may be empty), and with the last one its finish reason."""

    text: str
    finish_reason: FinishReason | None


class Completion:
    """An answer that the engine is making. Close it whenever nobody wants more: the engine stops at once."""

    def __init__(self, prompt_tokens: int, generation: Generation, text: TextStream) -> None:
        self.prompt_tokens = prompt_tokens
        self._prefilled = 0
        self._generation = generation
        self._text = text

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far; at a stop string they end with the token that completed it."""
        return self._text.completion_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
        )

    @property
    def meter(self) -> MeterReading:
        """What the engine has done for it so far: of the prompt, too, only the tokens that are computed."""
        return MeterReading(self._prefilled, self.completion_tokens)

    async def updates(self) -> AsyncIterator[Update]:
        """One for each output of the engine, in order; the last bears the finish reason. Raises ApiError.

        Of a metered call also one for each chunk of the prompt that was computed, before any token.
        """
        try:
            async for output in self._generation:
                self._prefilled = self.prompt_tokens if output.prefilled is None else output.prefilled
                text = self._text.push(output.token_ids, output.finish_reason)
                if self._text.finish_reason is not None:
                    # At a stop string the engine would go on: end it now, however slowly the client reads.
                    await self.close()
                yield Update(text, self._text.finish_reason)
        except EngineError as fault:
            raise engine_fault(fault) from fault

    async def close(self) -> None:
        await self._generation.aclose()


class ChatService:
    """Turns valid chat requests into completions of one model."""

    def __init__(self, engine: EngineClient, template: ChatTemplate, model: str) -> None:
        """``model``: the name that requests ask for it by."""
        self.engine = engine
        self.model = model
        self._template = template

    async def start(self, parameters: ChatParameters, call: Call) -> Completion:
        """Hand the request to the engine. Raises ApiError; then nothing runs. The caller must close the completion."""
        if parameters.model != self.model:
            raise model_not_found(parameters.model)
        prompt = await self._prompt(parameters.messages)
        max_tokens = self._max_tokens(len(prompt), parameters, call)
        request = EngineRequest(
            request_id=uuid4().hex,
            prompt_token_ids=prompt,
            sampling=parameters.sampling,
            max_tokens=max_tokens,
            stop_token_ids=[] if parameters.ignore_eos else self.engine.info.eos_token_ids,
            priority=call.priority,
            salt=call.salt,
        )
        try:
            generation = self.engine.generate(request, progress=call.metered)
        except EngineError as fault:
            raise engine_fault(fault) from fault
        return Completion(len(prompt), generation, TextStream(self._template.tokenizer, parameters.stop))

    async def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        size = sum(len(message["content"].encode()) for message in messages)
        limit = self.engine.info.max_model_len
        if size > limit * self._template.tokenizer.longest_token or len(messages) > limit:
            # Too long whatever its tokens are: don't spend time on counting them.
            raise context_length_exceeded(
                f"This model's context is {limit} tokens, and the messages, {len(messages)} with {size} bytes of text, "
                "are far longer. Shorten them."
            )
        try:
            if size + len(messages) * _MESSAGE_WORK < _LONG_PROMPT:
                return self._template.encode(messages)
            return await asyncio.to_thread(self._template.encode, messages)
        except (TemplateRefused, UntokenizableText) as fault:
            raise bad_request(str(fault), param="messages", code="invalid_value") from fault

    def _max_tokens(self, prompt_tokens: int, parameters: ChatParameters, call: Call) -> int:
        limit = self.engine.info.max_model_len
        room = limit - prompt_tokens
        if room < 1:
            raise context_length_exceeded(
                f"This model's context is {limit} tokens, but the messages make {prompt_tokens} tokens and leave no "
                "room for an answer. Shorten the messages."
            )
        wanted = parameters.max_tokens
        if wanted is None or (call.clamp_output and wanted > room):
            return room
        if wanted > room:
            field = parameters.max_tokens_field
            raise context_length_exceeded(
                f"This model's context is {limit} tokens, but the messages make {prompt_tokens} tokens and {field!r} "
                f"is {wanted}, together {prompt_tokens + wanted}. Shorten the messages, or set {field!r} to at most "
                f"{room}.",
                param=field,
            )
        return wanted


def engine_fault(fault: EngineError) -> ApiError:
    """How an engine's refusal or end is told to the one who asked."""
    if isinstance(fault, QueueFull):
        return overloaded(str(fault))
    if isinstance(fault, RequestRejected):
        return bad_request(str(fault))
    if isinstance(fault, EngineStopped):
        return overloaded("The worker is stopping. Send the request again.", code="worker_stopping")
    if isinstance(fault, EngineDead):
        return server_error(
            "The worker's engine stopped while it worked on this request. Send the request again.", code="engine_dead"
        )
    return server_error("The worker's engine failed on this request. Send the request again.")
