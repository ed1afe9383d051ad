"""One answer in the making: its choices, each a sequence in the engine, and what they cost together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from worker.engine.client import EngineError, Generation
from worker.engine.messages import EngineOutput
from worker.engine.output import TextStream
from worker.engine.plan import TokenLogprobs
from worker.protocol.usage import MeterReading, PromptTokensDetails, Usage
from worker.server.metrics import RequestMetrics
from worker.server.service import engine_fault


@dataclass(frozen=True, slots=True)
class Update:
    """What one choice gained; nothing but its place if only tokens came that show no text yet."""

    choice: int
    """Which of the answer's choices."""
    began: bool = False
    """Whether a token of it has been drawn, now or before."""
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of tokens that became certain to show in the text, where asked for."""
    starts: list[int] = field(default_factory=list)
    """Where in the choice's text each of them begins, in characters."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of more tokens of the prompt, its first left out, where asked for."""
    embedding: list[float] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    """What ended it: a stop string, or an id out of the caller's ``stop_token_ids``."""


class Choice:
    """One sequence of an answer."""

    def __init__(
        self, prompt: int, generation: Generation, text: TextStream, *, eos: Sequence[int] = (), mute: bool = False
    ) -> None:
        """``prompt``: which of the answer's prompts it goes on with. ``eos``: stop tokens that are no reason to name.

        ``mute``: whether what is drawn belongs neither to the text nor to the count: only the prompt was asked about.
        """
        self.prompt = prompt
        self.generation = generation
        self._text = text
        self._eos = frozenset(eos)
        self._mute = mute
        self._logprobs: list[TokenLogprobs] = []
        self._told = 0
        self._over: Literal["stop", "length"] | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far; at a stop string they end with the token that completed it."""
        return 0 if self._mute else self._text.completion_tokens

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        return self._over

    def push(self, index: int, output: EngineOutput) -> Update:
        """Take an output of the engine. ``index``: the choice's place in the answer."""
        prompt_logprobs = output.prompt_logprobs or []
        if self._mute:
            self._over = "length" if output.finish_reason is not None else None
            return Update(
                index, began=self._over is not None, prompt_logprobs=prompt_logprobs, finish_reason=self._over
            )
        text = self._text.push(output.token_ids, output.finish_reason, output.stop_token_id)
        self._over = self._text.finish_reason
        self._logprobs += output.logprobs or []
        told, self._told = self._told, self._text.shown_tokens
        stop_reason: str | int | None = self._text.stop_string
        if stop_reason is None and output.stop_token_id not in self._eos:
            stop_reason = output.stop_token_id
        return Update(
            index,
            began=self._text.completion_tokens > 0,
            text=text,
            logprobs=self._logprobs[told : self._told],
            starts=self._text.starts[told : self._told],
            prompt_logprobs=prompt_logprobs,
            embedding=output.embedding,
            finish_reason=self._over,
            stop_reason=stop_reason,
        )


class Answer:
    """The choices of one request. Close it whenever nobody wants more: the engine stops at once.

    If one choice fails, the answer does.
    """

    def __init__(
        self,
        prompt_tokens: Sequence[int],
        choices: Sequence[Choice],
        metrics: RequestMetrics,
        *,
        grammar_field: str | None = None,
    ) -> None:
        """``prompt_tokens``: how many each prompt has; a prompt counts once, however many choices go on with it.

        ``grammar_field``: the request's field that the grammar came from.
        """
        self._grammar_field = grammar_field
        self.prompt_tokens = sum(prompt_tokens)
        self.completion_tokens = 0
        self._lengths = prompt_tokens
        self._choices = choices
        self._metrics = metrics
        self._prefilled = [0] * len(prompt_tokens)
        self._cached: list[int | None] = [None] * len(prompt_tokens)
        self._compute_us = 0
        self._open = len(choices)
        self._pumps: list[asyncio.Task[None]] = []

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return self._open == 0

    @property
    def finish_reason(self) -> Literal["stop", "length"] | None:
        """The first choice's."""
        return self._choices[0].finish_reason

    @property
    def _cached_tokens(self) -> int:
        # Once for each prompt, as its first choice found it: the other choices find what that one computed.
        return sum(cached or 0 for cached in self._cached)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self._cached_tokens),
        )

    @property
    def meter(self) -> MeterReading:
        """What the engine has done for it so far: of the prompts, too, only the tokens that are computed."""
        prefilled = sum(self._prefilled)
        return MeterReading(prefilled, self.completion_tokens, min(self._cached_tokens, prefilled), self._compute_us)

    async def updates(self) -> AsyncIterator[Update]:
        """One for each output of the engine, each choice's in order; a choice's last bears its finish reason.

        Of a metered call also one for each chunk of a prompt that was computed, before any token. Raises ApiError.
        """
        try:
            async for index, output in self._outputs():
                choice = self._choices[index]
                if choice.finish_reason is not None:
                    continue
                before = choice.completion_tokens
                update = choice.push(index, output)
                generated = choice.completion_tokens - before
                self._metrics.output(output, generated)
                self.completion_tokens += generated
                self._count(choice.prompt, output)
                if update.finish_reason is not None:
                    self._open -= 1
                    # At a stop string the engine would go on: end it now, however slowly the client reads.
                    await choice.generation.aclose()
                yield update
                if self.finished:
                    return
        except EngineError as fault:
            raise engine_fault(fault, self._grammar_field) from fault

    def _count(self, prompt: int, output: EngineOutput) -> None:
        prefilled = self._lengths[prompt] if output.prefilled is None else output.prefilled
        self._prefilled[prompt] = max(self._prefilled[prompt], prefilled)
        if self._cached[prompt] is None:
            self._cached[prompt] = output.cached_tokens
        self._compute_us += output.compute_us

    async def _outputs(self) -> AsyncIterator[tuple[int, EngineOutput]]:
        if len(self._choices) == 1:
            async for output in self._choices[0].generation:
                yield 0, output
            return
        # One place: what is not taken yet waits in its generation, which merges it.
        news: asyncio.Queue[tuple[int, EngineOutput | EngineError]] = asyncio.Queue(1)
        self._pumps = [
            asyncio.create_task(_pump(index, choice.generation, news)) for index, choice in enumerate(self._choices)
        ]
        while True:
            index, item = await news.get()
            if isinstance(item, EngineError):
                raise item
            yield index, item

    async def close(self) -> None:
        for choice in self._choices:
            await choice.generation.aclose()
        for pump in self._pumps:
            pump.cancel()


async def _pump(
    index: int, generation: Generation, news: asyncio.Queue[tuple[int, EngineOutput | EngineError]]
) -> None:
    try:
        async for output in generation:
            await news.put((index, output))
    except EngineError as fault:
        await news.put((index, fault))
