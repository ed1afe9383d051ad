"""Chat completions: from a valid request to an answer in OpenAI's shape, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import msgspec

from worker.engine.messages import EngineRequest
from worker.engine.output import TextStream
from worker.engine.plan import TokenLogprobs
from worker.protocol.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FinishReason,
    Message,
)
from worker.protocol.errors import bad_request, context_length_exceeded
from worker.protocol.usage import Usage
from worker.server import choices
from worker.server.answer import AnswerHead, Writer
from worker.server.call import Call
from worker.server.chat_template import TemplateRefused
from worker.server.choices import Answer, Update
from worker.server.logprobs import chat_logprobs
from worker.server.metrics import RequestMetrics
from worker.server.parameters import ChatParameters
from worker.server.prompting import Prompting
from worker.server.sampling_parameters import draw_seed
from worker.server.service import LONG_TEXT, ModelService
from worker.server.tokenizer import Tokenizer, UntokenizableText

_MESSAGE_WORK = 256
"""A message's own work, in bytes of text that take as long."""

_encode = msgspec.json.Encoder().encode


class ChatExchange:
    """One chat request and its answer."""

    endpoint = "chat"

    def __init__(self, service: ModelService, parameters: ChatParameters, call: Call) -> None:
        self._service = service
        self._parameters = parameters
        self._call = call
        self.stream = parameters.stream
        self._head = AnswerHead(f"chatcmpl-{call.request_id.replace('-', '')}", int(time.time()), parameters.model)

    async def start(self, metrics: RequestMetrics) -> Answer:
        """Hand the request to the engine. Raises ApiError; then nothing runs. The caller must close the answer."""
        service, parameters, call = self._service, self._parameters, self._call
        service.check_name(parameters.model)
        prompt = await encode_chat(service, parameters.prompting)
        drawing = parameters.drawing
        service.check_count(drawing.choices)
        max_tokens = service.max_tokens(
            len(prompt),
            drawing.max_tokens,
            call,
            what="messages make",
            param="messages",
            field=drawing.max_tokens_field,
        )
        eos = service.engine.info.eos_token_ids
        seed = draw_seed() if drawing.seed is None else drawing.seed
        requests = [
            EngineRequest(
                request_id=uuid4().hex,
                prompt_token_ids=prompt,
                sampling=drawing.of_choice(index, seed, eos),
                max_tokens=max_tokens,
                stop_token_ids=drawing.ends(eos),
                priority=call.priority,
                salt=call.salt,
                tenant=call.tenant,
                weight=call.weight,
                grammar=drawing.grammar,
            )
            for index in range(drawing.choices)
        ]
        generations = await service.submit(requests, progress=call.metered)
        detokenizer = service.tokenizer.showing() if drawing.show_special else service.tokenizer
        return Answer(
            [len(prompt)],
            [
                choices.Choice(
                    0,
                    generation,
                    TextStream(
                        detokenizer,
                        drawing.stop,
                        min_tokens=drawing.sampling.min_tokens,
                        include_stop=drawing.include_stop,
                        locate=parameters.logprobs,
                    ),
                    eos=() if drawing.ignore_eos else eos,
                )
                for generation in generations
            ],
            metrics,
        )

    def writer(self) -> Writer:
        count, tokenizer = self._parameters.drawing.choices, self._service.tokenizer
        if not self.stream:
            return WholeChat(self._head, count, tokenizer if self._parameters.logprobs else None)
        return StreamedChat(
            self._head,
            count,
            tokenizer if self._parameters.logprobs else None,
            include_usage=self._parameters.include_usage,
        )


async def encode_chat(service: ModelService, prompting: Prompting) -> list[int]:
    """The token ids of a chat's prompt. Raises ApiError (400)."""
    size, count = prompting.text_bytes, len(prompting.messages)
    service.check_text_size(size, f"text of {count} messages", "messages")
    if count > service.context:
        raise context_length_exceeded(
            f"This model's context is {service.context} tokens, and there are {count} messages. Send fewer."
        )
    more = 0 if prompting.tools is None and not prompting.variables else LONG_TEXT

    def encode() -> list[int]:
        return service.template.encode(
            prompting.messages,
            tools=prompting.tools,
            add_generation_prompt=prompting.add_generation_prompt,
            continue_final_message=prompting.continue_final_message,
            variables=prompting.variables,
        )

    try:
        if size + count * _MESSAGE_WORK + more < LONG_TEXT:
            return encode()
        return await asyncio.to_thread(encode)
    except (TemplateRefused, UntokenizableText) as fault:
        raise bad_request(str(fault), param="messages", code="invalid_value") from fault


class WholeChat:
    """Writes a chat's answer as one JSON body."""

    def __init__(self, head: AnswerHead, count: int, logprobs_of: Tokenizer | None) -> None:
        """``logprobs_of``: the tokenizer, where log-probabilities are asked for."""
        self._head = head
        self._logprobs_of = logprobs_of
        self._texts: list[list[str]] = [[] for _ in range(count)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._ends: list[tuple[FinishReason | None, str | int | None]] = [(None, None)] * count

    def push(self, update: Update) -> list[bytes]:
        self._texts[update.choice].append(update.text)
        self._logprobs[update.choice] += update.logprobs
        if update.finish_reason is not None:
            self._ends[update.choice] = (update.finish_reason, update.stop_reason)
        return []

    def end(self, usage: Usage) -> list[bytes]:
        head = self._head
        written = [self._choice(index) for index in range(len(self._texts))]
        return [
            _encode(ChatCompletion(id=head.id, created=head.created, model=head.model, choices=written, usage=usage))
        ]

    def _choice(self, index: int) -> Choice:
        finish_reason, stop_reason = self._ends[index]
        logprobs = None
        if self._logprobs_of is not None:
            logprobs = chat_logprobs(self._logprobs[index], self._logprobs_of)
        return Choice(index, Message("assistant", "".join(self._texts[index])), finish_reason, logprobs, stop_reason)


class StreamedChat:
    """Writes a chat's answer in chunks: of each choice the role first, then text as it comes, and one finish reason;
    at the end the usage, if asked for.
    """

    def __init__(self, head: AnswerHead, count: int, logprobs_of: Tokenizer | None, *, include_usage: bool) -> None:
        """``logprobs_of``: the tokenizer, where log-probabilities are asked for."""
        self._head = head
        self._logprobs_of = logprobs_of
        self._begun = [False] * count
        self._include_usage = include_usage

    def push(self, update: Update) -> list[bytes]:
        index = update.choice
        written: list[bytes] = []
        if update.began and not self._begun[index]:
            self._begun[index] = True
            written.append(self._chunk(index, Delta(role="assistant", content="")))
        logprobs = None
        if self._logprobs_of is not None and update.logprobs:
            logprobs = chat_logprobs(update.logprobs, self._logprobs_of)
        if update.text or logprobs is not None:
            written.append(self._chunk(index, Delta(content=update.text), logprobs))
        if update.finish_reason is not None:
            written.append(
                self._event([ChunkChoice(index, Delta(), update.finish_reason, stop_reason=update.stop_reason)])
            )
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
