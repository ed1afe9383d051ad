"""Chat completions: from a valid request to the choices that answer it."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

from worker.engine.messages import EngineRequest, Grammar
from worker.engine.output import Detokenizer, TextStream
from worker.protocol.errors import bad_request, context_length_exceeded
from worker.server.answer import AnswerHead, Writer
from worker.server.call import Call
from worker.server.chat_template import TemplateRefused
from worker.server.chat_writers import ChatPieces, StreamedChat, WholeChat
from worker.server.choices import Answer, Choice
from worker.server.metrics import RequestMetrics
from worker.server.parameters import ChatParameters
from worker.server.prompting import Prompting
from worker.server.sampling_parameters import draw_seed
from worker.server.service import LONG_TEXT, ModelService
from worker.server.tokenizer import UntokenizableText

_MESSAGE_WORK = 256
"""A message's own work, in bytes of text that take as long."""


class ChatExchange:
    """One chat request and its answer."""

    endpoint = "chat"

    def __init__(self, service: ModelService, parameters: ChatParameters, call: Call) -> None:
        """Raises ApiError (400)."""
        self._service = service
        self._parameters = parameters
        self._call = call
        self.stream = parameters.stream
        self._grammar = self._form()
        self._head = AnswerHead(f"chatcmpl-{call.request_id.replace('-', '')}", int(time.time()), parameters.model)

    async def start(self, metrics: RequestMetrics) -> Answer:
        """Hand the request to the engine. Raises ApiError; then nothing runs. The caller must close the answer."""
        service, parameters, call = self._service, self._parameters, self._call
        service.check_name(parameters.model)
        prompt = await encode_chat(service, parameters.prompting)
        drawing = parameters.drawing
        service.check_count(drawing.choices, "n")
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
                grammar=self._grammar,
            )
            for index in range(drawing.choices)
        ]
        generations = await service.submit(requests, progress=call.metered)
        detokenizer: Detokenizer = service.tokenizer
        if drawing.show_special:
            detokenizer = service.tokenizer.showing()
        elif parameters.tools.mode != "none":
            # Where the marks of a call are special tokens, the parser has to see them.
            detokenizer = service.tokenizer.showing(service.tool_format.markers)
        return Answer(
            [len(prompt)],
            [
                Choice(
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
            grammar_field="tools" if parameters.tools.mode == "required" else drawing.grammar_field,
        )

    def writer(self) -> Writer:
        parameters, service = self._parameters, self._service
        pieces = [ChatPieces(parameters.tools.parser(service.tool_format)) for _ in range(parameters.drawing.choices)]
        logprobs_of = service.tokenizer if parameters.logprobs else None
        if self.stream:
            return StreamedChat(self._head, pieces, logprobs_of, include_usage=parameters.include_usage)
        return WholeChat(self._head, pieces, logprobs_of)

    def _form(self) -> Grammar | None:
        """What the text must be: as the request asks for it, or a call where one is required. Raises ApiError (400)."""
        tools, form = self._parameters.tools, self._parameters.drawing.grammar
        if tools.mode == "auto" and not self._service.template.shows_tools:
            raise bad_request(
                "This model's chat template has no place for tools, so the model would not know of them. Leave 'tools' "
                "out, or force a call by 'tool_choice'.",
                param="tools",
                code="unsupported_parameter",
            )
        forced = tools.grammar(self._service.tool_format)
        if forced is not None and form is not None:
            raise bad_request(
                "A required tool call and a form of the output (as by 'response_format') can't both rule it. Send one "
                "of them.",
                param="tool_choice",
                code="invalid_value",
            )
        return forced or form


async def encode_chat(service: ModelService, prompting: Prompting) -> list[int]:
    """The token ids of a chat's prompt. Raises ApiError (400)."""
    size, count = prompting.text_bytes, len(prompting.messages)
    service.check_text_size(size, f"text of {count} messages", "messages")
    if count > service.context:
        raise context_length_exceeded(
            f"This model's context is {service.context} tokens, and there are {count} messages. Send fewer."
        )
    service.check_text_size(prompting.tool_bytes, "text of the tools", "tools")
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
