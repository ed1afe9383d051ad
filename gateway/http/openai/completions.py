"""``POST /v1/completions``. Reference: https://platform.openai.com/docs/api-reference/completions/create"""

from __future__ import annotations

from functools import partial

from gateway.ask import Ask, given
from gateway.http.inference import Reference
from gateway.http.openai import fields
from gateway.http.openai.door import OpenAIDoor
from gateway.http.openai.inputs import read_inputs
from gateway.http.openai.reference import CompletionOperation
from gateway.long_work import worked
from gateway.tenants.principal import Principal
from worker.protocol.errors import bad_request

COMPLETIONS = Reference(
    "/v1/completions", CompletionOperation, "createCompletion", "Create a completion", "Completions"
)


class CompletionsDoor(OpenAIDoor):
    async def ask(self, raw: bytes, principal: Principal) -> Ask:
        end_user, tags = self.client.text(fields.END_USER_HEADER), self.client.text(fields.TAGS_HEADER)
        return await worked(len(raw), partial(parse_completion, raw, end_user=end_user, tags=tags))


def parse_completion(raw: bytes, *, end_user: str | None = None, tags: str | None = None) -> Ask:
    """``end_user``, ``tags``: what the headers of these names say. Raises ApiError (400)."""
    body = fields.read_body(raw, "prompt")
    model = fields.read_model(body)
    inputs = read_inputs(body, "prompt")
    if given(body, "max_completion_tokens"):  # some servers would obey it, whatever 'max_tokens' says
        raise bad_request(
            "Unsupported parameter: 'max_completion_tokens'. In completions, it is 'max_tokens'.",
            param="max_completion_tokens",
            code="unsupported_parameter",
        )
    echo = fields.read_flag(body, "echo")
    choices = fields.read_count(body, "n", fields.MAX_CHOICES) or 1
    drawn = fields.read_count(body, "best_of", fields.MAX_CHOICES) or 1
    return Ask(
        body=body,
        model=model,
        size=len(raw),
        stream=fields.read_flag(body, "stream"),
        include_usage=fields.read_include_usage(body),
        choices=max(choices, drawn) * len(inputs),
        max_output_tokens=fields.read_count(body, "max_tokens", least=0 if echo else 1),
        end_user=fields.read_end_user(body, end_user),
        tags=fields.read_tags(tags),
        raw=raw,
        api="completions",
        inputs=inputs,
        prompt_field="prompt",
    )
