"""What one request gets from the engine, whatever its reader's pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Final, Self

from worker.engine.messages import EngineOutput
from worker.engine.plan import TokenLogprobs
from worker.engine.request import ControlRefused, EngineError, GrammarFailed, QueueTimeout, RequestRejected

_ERRORS: Final[dict[str | None, type[EngineError]]] = {
    "queue_timeout": QueueTimeout,
    "grammar": GrammarFailed,
    "asleep": ControlRefused,
}


class Generation(AsyncIterator[EngineOutput]):
    """The outputs of one request.

    Outputs that a slow reader has not taken are merged into one, so that at most ``max_tokens`` ids wait. The last
    output has ``finish_reason`` ``stop`` or ``length``; trouble is raised instead (EngineDead, RequestRejected,
    QueueTimeout, GrammarFailed, ControlRefused), after the tokens that came before it. Waiting may be cancelled (a
    timeout for a keep-alive) and taken up again.

    Close it (``async with``, ``aclose``) when nobody wants more: the request ends in the engine at once, and
    tokens drawn after that are thrown away.
    """

    def __init__(self, request_id: str, *, abort: Callable[[Generation], None], progress: bool) -> None:
        """``abort``: called with this one when nobody wants more. The others are as in ``EngineClient.generate``."""
        self.request_id = request_id
        self._abort = abort
        self._progress = progress
        self._next: EngineOutput | None = None
        self._error: EngineError | None = None
        self._closed = False
        self._news = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        while not self._closed:
            output = self._next
            if output is not None and (self._progress or not _is_progress(output)):
                self._next = None
                self._closed = output.finish_reason is not None
                return output
            if self._error is not None:
                self._closed = True
                raise self._error
            self._news.clear()
            await self._news.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the request; nothing happens when it has ended already."""
        if not self._closed:
            self._closed = True
            self._news.set()
            self._abort(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def deliver(self, output: EngineOutput) -> None:
        """The engine gave this."""
        if self._closed:
            return  # drawn after the reader left: unread and unbilled
        if output.finish_reason == "error":
            kind = _ERRORS.get(output.error_kind, RequestRejected)
            self._error = kind(output.error or "The engine refused the request.")
        else:
            self._next = output if self._next is None else merge(self._next, output)
        self._news.set()

    def fail(self, error: EngineError) -> None:
        """Nothing more will come."""
        self._error = error
        self._news.set()


def _is_progress(output: EngineOutput) -> bool:
    """Whether an output says nothing but how far the prompt is computed."""
    return not output.token_ids and output.finish_reason is None


def merge(first: EngineOutput, then: EngineOutput) -> EngineOutput:
    """Two outputs of one request as one."""
    return EngineOutput(
        request_id=then.request_id,
        token_ids=first.token_ids + then.token_ids,
        finish_reason=then.finish_reason,
        prefilled=then.prefilled if not first.token_ids else None,
        stop_token_id=then.stop_token_id,
        cached_tokens=_first_of(first.cached_tokens, then.cached_tokens),
        queued_us=_first_of(first.queued_us, then.queued_us),
        compute_us=first.compute_us + then.compute_us,
        logprobs=_joined(first.logprobs, then.logprobs),
        prompt_logprobs=_joined(first.prompt_logprobs, then.prompt_logprobs),
        embedding=then.embedding,
    )


def _first_of(first: int | None, then: int | None) -> int | None:
    return then if first is None else first


def _joined(first: list[TokenLogprobs] | None, then: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    if first is None or then is None:
        return then if first is None else first
    return first + then
