"""How a chat's answer is written in OpenAI's shape, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from worker.engine.plan import TokenLogprobs
from worker.protocol.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FinishReason,
    FunctionCall,
    FunctionCallDelta,
    Message,
    ToolCall,
    ToolCallDelta,
)
from worker.protocol.usage import Usage
from worker.server.answer import AnswerHead
from worker.server.choices import Update
from worker.server.logprobs import chat_logprobs
from worker.server.tokenizer import Tokenizer
from worker.server.tools import CallArguments, CallStart, Piece, Text, ToolCallParser

_encode = msgspec.json.Encoder().encode


class ChatPieces:
    """One choice's text as what it is made of: text for the reader, and calls of tools."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        """``parser``: None if no tool may be called."""
        self._parser = parser
        self._calls = False
        self.finish_reason: FinishReason | None = None

    def push(self, update: Update) -> list[Piece]:
        parser = self._parser
        if parser is None:
            pieces: list[Piece] = [Text(update.text)] if update.text else []
        else:
            pieces = parser.push(update.text) if update.text else []
            if update.finish_reason is not None:
                pieces += parser.finish()
        self._calls |= any(isinstance(piece, CallStart) for piece in pieces)
        self.finish_reason = update.finish_reason
        if self._calls and update.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        return pieces


class WholeChat:
    """Writes a chat's answer as one JSON body."""

    def __init__(self, head: AnswerHead, choices: Sequence[ChatPieces], logprobs_of: Tokenizer | None) -> None:
        """``logprobs_of``: the tokenizer, where log-probabilities are asked for."""
        self._head = head
        self._choices = choices
        self._logprobs_of = logprobs_of
        self._texts: list[list[str]] = [[] for _ in choices]
        self._calls: list[list[tuple[CallStart, list[str]]]] = [[] for _ in choices]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in choices]
        self._stop_reasons: list[str | int | None] = [None] * len(choices)

    def push(self, update: Update) -> list[bytes]:
        index = update.choice
        for piece in self._choices[index].push(update):
            if isinstance(piece, Text):
                self._texts[index].append(piece.text)
            elif isinstance(piece, CallStart):
                self._calls[index].append((piece, []))
            else:
                self._calls[index][piece.index][1].append(piece.text)
        self._logprobs[index] += update.logprobs
        self._stop_reasons[index] = update.stop_reason
        return []

    def end(self, usage: Usage) -> list[bytes]:
        head = self._head
        written = [self._choice(index) for index in range(len(self._choices))]
        return [
            _encode(ChatCompletion(id=head.id, created=head.created, model=head.model, choices=written, usage=usage))
        ]

    def _choice(self, index: int) -> Choice:
        logprobs = None
        if self._logprobs_of is not None:
            logprobs = chat_logprobs(self._logprobs[index], self._logprobs_of)
        return Choice(
            index, self._message(index), self._choices[index].finish_reason, logprobs, self._stop_reasons[index]
        )

    def _message(self, index: int) -> Message:
        text = "".join(self._texts[index])
        if not self._calls[index]:
            return Message("assistant", text)
        calls = [
            ToolCall(id=start.id, function=FunctionCall(start.name, "".join(arguments)))
            for start, arguments in self._calls[index]
        ]
        return Message("assistant", text or None, tool_calls=calls)


class StreamedChat:
    """Writes a chat's answer in chunks: of each choice the role first, then text and calls as they come, and one
    finish reason; at the end the usage, if asked for.
    """

    def __init__(
        self,
        head: AnswerHead,
        choices: Sequence[ChatPieces],
        logprobs_of: Tokenizer | None,
        *,
        include_usage: bool,
    ) -> None:
        """``logprobs_of``: the tokenizer, where log-probabilities are asked for."""
        self._head = head
        self._choices = choices
        self._logprobs_of = logprobs_of
        self._begun = [False] * len(choices)
        self._include_usage = include_usage

    def push(self, update: Update) -> list[bytes]:
        index = update.choice
        written: list[bytes] = []
        if update.began and not self._begun[index]:
            self._begun[index] = True
            written.append(self._chunk(index, Delta(role="assistant", content="")))
        deltas = [_delta(piece) for piece in self._choices[index].push(update)]
        logprobs: ChoiceLogprobs | None = None
        if self._logprobs_of is not None and update.logprobs:
            logprobs = chat_logprobs(update.logprobs, self._logprobs_of)
            # They go with the first piece; text that is held back sends them ahead of it.
            deltas = deltas or [Delta(content="")]
        for delta in deltas:
            written.append(self._chunk(index, delta, logprobs))
            logprobs = None
        if update.finish_reason is not None:
            reason = self._choices[index].finish_reason
            written.append(self._event([ChunkChoice(index, Delta(), reason, stop_reason=update.stop_reason)]))
        return written

    def end(self, usage: Usage) -> list[bytes]:
        return [self._event([], usage)] if self._include_usage else []

    def _chunk(self, index: int, delta: Delta, logprobs: ChoiceLogprobs | None = None) -> bytes:
        return self._event([ChunkChoice(index, delta, logprobs=logprobs)])

    def _event(self, written: list[ChunkChoice], usage: Usage | None = None) -> bytes:
        head = self._head
        return _encode(
            ChatCompletionChunk(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=written,
                usage=usage if self._include_usage else msgspec.UNSET,
            )
        )


def _delta(piece: Piece) -> Delta:
    if isinstance(piece, Text):
        return Delta(content=piece.text)
    if isinstance(piece, CallArguments):
        return Delta(tool_calls=[ToolCallDelta(index=piece.index, function=FunctionCallDelta(arguments=piece.text))])
    function = FunctionCallDelta(name=piece.name, arguments="")
    return Delta(tool_calls=[ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)])
