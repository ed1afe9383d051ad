"""OpenAI's own API.

- Errors are ``{"error": {"message", "type", "param", "code"}}``, spread over lines; a wrong key is repeated masked, and
  who pays is named. Too many requests tell ``retry-after-ms`` beside ``retry-after``; no credit is a 429, too.
- A fault in a stream is an event with such an error, and the body ends.
- Usage is in a chunk of its own if it is asked for, and then null in all the others. ``obfuscation`` pads chunks.
- Reasoning models refuse ``max_tokens`` and tell no reasoning, only its tokens.
- Cookies and ``openai-organization`` stand in the head of each answer.

Reference: https://platform.openai.com/docs/api-reference/chat/create, .../chat-streaming, .../guides/error-codes,
.../guides/rate-limits.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from tests.standins.base import CREATED, PROMPT_TOKENS, Reply, Request, compact
from tests.standins.openai_words import Json, OpenAIWords, error

ORGANIZATION = "org-AbCdEfGhIjKlMnOpQrStUvWx"
HEAD = {
    "openai-organization": ORGANIZATION,
    "openai-processing-ms": "120",
    "x-request-id": "req_of_openai",
    "x-ratelimit-remaining-requests": "9999",
    "set-cookie": "__cf_bm=secret; path=/; HttpOnly",
}


class OpenAIHosted(OpenAIWords):
    brand = "openai"
    errors: ClassVar[dict[str, tuple[int, Json]]] = {
        "context_length": (
            400,
            error(
                "This model's maximum context length is 2048 tokens. However, your messages resulted in 4096 tokens.",
                "invalid_request_error",
                param="messages",
                code="context_length_exceeded",
            ),
        ),
        "unauthorized": (
            401,
            error(
                "Incorrect API key provided: sk-proj-********************cdef. You can find your API key at "
                "https://platform.openai.com/account/api-keys.",
                "invalid_request_error",
                code="invalid_api_key",
            ),
        ),
        "no_model": (
            404,
            error(
                "The model `other` does not exist or you do not have access to it.",
                "invalid_request_error",
                code="model_not_found",
            ),
        ),
        "rate_limited": (
            429,
            error(
                f"Rate limit reached for the-model in organization {ORGANIZATION} on requests per min (RPM): Limit 3, "
                "Used 3, Requested 1. Please try again in 350ms.",
                "requests",
                code="rate_limit_exceeded",
            ),
        ),
        "no_credit": (
            429,
            error(
                "You exceeded your current quota, please check your plan and billing details.",
                "insufficient_quota",
                code="insufficient_quota",
            ),
        ),
        "failing": (
            500,
            error("The server had an error while processing your request. Sorry about that!", "server_error"),
        ),
        "loading": (503, error("That model is currently overloaded with other requests.", "server_error")),
    }

    def answer(self, request: Request, scenario: str) -> Reply:
        if scenario == "no_credit":
            reply = self.refused(scenario, request)
        elif request.path.endswith("/chat/completions") and "max_tokens" in request.body:
            reply = Reply(status=400, body=_spread(_unsupported("max_tokens")))
        else:
            reply = super().answer(request, scenario)
        reply.headers = HEAD | reply.headers
        return reply

    def refused(self, scenario: str, request: Request) -> Reply:
        status, told = self.errors[scenario]
        headers = {"retry-after": "1", "retry-after-ms": "350"} if scenario == "rate_limited" else {}
        return Reply(status=status, body=_spread(told), headers=headers)

    def unknown_path(self) -> Reply:
        return Reply(status=404, body=_spread(error("Invalid URL (POST /v1/x)", "invalid_request_error")))

    def error_event(self) -> bytes:
        told = error("The server had an error while processing your request. Sorry about that!", "server_error")
        return b"data: " + compact(told) + b"\n\n"

    def after_error(self) -> list[bytes]:
        return []

    def model_card(self) -> Json:
        return {"id": self.model, "object": "model", "created": CREATED, "owned_by": "system"}

    def usage(self, completion_tokens: int) -> Json:
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": completion_tokens,
            "total_tokens": PROMPT_TOKENS + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 3 if completion_tokens >= 3 else 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def reasoning_delta(self, text: str) -> Json:
        return {}

    def role_delta(self) -> Json:
        return {"role": "assistant", "content": "", "refusal": None}

    def message(self, scenario: str) -> Json:
        return super().message(scenario) | {"refusal": None, "annotations": []}

    def chunk(self, request: Request, choices: list[Json], **more: Any) -> Json:
        usage: Json = {"usage": None} if (request.body.get("stream_options") or {}).get("include_usage") else {}
        head = super().chunk(request, [])
        head |= {"service_tier": "default", "system_fingerprint": "fp_44709d6fcb", "choices": choices}
        return head | usage | {"obfuscation": "aB3xQ"} | more


def _unsupported(name: str) -> Json:
    message = f"Unsupported parameter: '{name}' is not supported with this model. Use 'max_completion_tokens' instead."
    return error(message, "invalid_request_error", param=name, code="unsupported_parameter")


def _spread(value: object) -> bytes:
    return json.dumps(value, indent=2).encode()
