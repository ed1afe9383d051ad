"""``/tokenize`` and its like: what a prompt becomes, for whoever counts or templates before sending."""

from __future__ import annotations

import functools
from typing import Any

import structlog
from litestar import Request, Response, Router, get, post
from litestar.types import ControllerRouterHandler

from worker.protocol import token_counting
from worker.protocol.errors import bad_request
from worker.protocol.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest, TokenizerInfo
from worker.server.body import convert, decode, invalid, read, shown
from worker.server.chat import encode_chat
from worker.server.door import Door
from worker.server.inputs import encode_inputs
from worker.server.prompting import Prompting, read_prompting
from worker.server.service import ModelService
from worker.server.token_counting import describe_counting
from worker.server.tools import read_tools

log = structlog.get_logger("penstock.worker")


def token_routes(service: ModelService, door: Door) -> list[ControllerRouterHandler]:
    """Route handlers for the worker's application, at its root.

    They are guarded as ``/v1`` is. What gateways count by needs the fleet token wherever there is one: it is large.
    """

    @post("/tokenize", status_code=200)
    async def tokenize(request: Request[Any, Any, Any]) -> Tokenized:
        asked, prompting = await read(await request.body(), prompt_of)
        service.check_name(asked.model or service.name)
        if prompting is not None:
            ids = await encode_chat(service, prompting)
        else:
            (ids,) = await encode_inputs(
                service,
                [asked.prompt or ""],
                "prompt",
                add_special=asked.add_special_tokens is not False,
                may_be_empty=True,
            )
        spelled = None
        if asked.return_token_strs:
            spelled = [service.tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in ids]
        return Tokenized(count=len(ids), max_model_len=service.context, tokens=ids, token_strs=spelled)

    def prompt_of(body: bytes) -> tuple[TokenizeRequest, Prompting | None]:
        asked = convert(decode(body, "'prompt' or 'messages'"), TokenizeRequest)
        if (asked.messages is None) == (asked.prompt is None):
            raise bad_request("Send either 'prompt' or 'messages'.", param="prompt", code="missing_required_parameter")
        if asked.messages is None:
            return asked, None
        return asked, read_prompting(asked.messages, asked, read_tools(asked.tools))

    @post("/detokenize", status_code=200)
    async def detokenize(request: Request[Any, Any, Any]) -> Detokenized:
        return await read(await request.body(), text_of)

    def text_of(body: bytes) -> Detokenized:
        asked = convert(decode(body, "'tokens'"), DetokenizeRequest)
        service.check_name(asked.model or service.name)
        vocab_size = service.engine.info.vocab_size
        for token_id in asked.tokens:
            if not 0 <= token_id < vocab_size:
                raise invalid(f"'tokens' holds {shown(token_id)}. Token ids are 0 to {vocab_size - 1}.", "tokens")
        return Detokenized(service.tokenizer.showing().decode_bytes(asked.tokens).decode(errors="replace"))

    @get("/tokenizer_info", sync_to_thread=False)
    def tokenizer_info() -> TokenizerInfo:
        tokenizer = service.tokenizer
        return TokenizerInfo(
            bos_token=tokenizer.bos_token or None,
            eos_token=tokenizer.eos_token or None,
            add_bos_token=bool(tokenizer.prefix_ids),
            chat_template=service.template.source,
            model_max_length=service.context,
        )

    @functools.cache
    def counting() -> bytes:
        told, why_not = describe_counting(service.template)
        if why_not is not None:
            log.info("gateways bound the prompts of this model rather than count them", because=why_not)
        return token_counting.encode_counting(told)

    @get(token_counting.PATH, sync_to_thread=True, guards=[door.guard_fleet])
    def tell_counting() -> Response[bytes]:
        return Response(counting(), media_type=token_counting.MEDIA_TYPE)

    return [
        Router("/", guards=[door.guard], route_handlers=[tokenize, detokenize, tokenizer_info]),
        tell_counting,
    ]
