"""``POST /v1/embeddings``. Reference: https://platform.openai.com/docs/api-reference/embeddings/create"""

from __future__ import annotations

from functools import partial

from gateway.ask import Ask, given
from gateway.http.inference import Reference
from gateway.http.openai import fields
from gateway.http.openai.door import OpenAIDoor
from gateway.http.openai.inputs import read_inputs
from gateway.http.openai.reference import EmbeddingOperation
from gateway.long_work import worked
from gateway.tenants.principal import Principal
from worker.protocol.errors import bad_request

EMBEDDINGS = Reference("/v1/embeddings", EmbeddingOperation, "createEmbedding", "Create embeddings", "Embeddings")


class EmbeddingsDoor(OpenAIDoor):
    async def ask(self, raw: bytes, principal: Principal) -> Ask:
        end_user, tags = self.client.text(fields.END_USER_HEADER), self.client.text(fields.TAGS_HEADER)
        return await worked(len(raw), partial(parse_embedding, raw, end_user=end_user, tags=tags))


def parse_embedding(raw: bytes, *, end_user: str | None = None, tags: str | None = None) -> Ask:
    """``end_user``, ``tags``: what the headers of these names say. Raises ApiError (400)."""
    body = fields.read_body(raw, "input")
    model = fields.read_model(body)
    inputs = read_inputs(body, "input")
    if given(body, "messages"):  # vLLM would embed those, and fetch what they name
        raise bad_request("Chats are not embedded here. Send texts as 'input'.", param="messages")
    if fields.read_flag(body, "stream"):
        raise bad_request("Embeddings are not streamed. Leave 'stream' out.", param="stream")
    return Ask(
        body=body,
        model=model,
        size=len(raw),
        stream=False,
        include_usage=False,
        choices=len(inputs),
        max_output_tokens=None,
        end_user=fields.read_end_user(body, end_user),
        tags=fields.read_tags(tags),
        raw=raw,
        api="embeddings",
        inputs=inputs,
        prompt_field="input",
    )
