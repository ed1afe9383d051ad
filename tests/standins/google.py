"""Google's endpoint for Gemini that is compatible with OpenAI's API.

- It lies at ``/v1beta/openai/chat/completions``, without ``/v1``.
- Errors are lists of one: ``[{"error": {"code", "message", "status", "details"}}]``, spread over lines. A wrong key
  is a 400, its reason ``API_KEY_INVALID``.
- Several tokens come in a chunk. Usage stands in chunks with content, and there is none without a choice.
- Tool calls come whole, without an index, with ``extra_content`` that a next request has to repeat; the reason to
  finish is then ``stop`` in a stream, and ``tool_calls`` in a whole answer.
- There are no completions.

Reference: https://ai.google.dev/gemini-api/docs/openai; n4ze3m/page-assist#406 (errors), open-webui/computer#224 and
googleapis/python-genai#2868 (tool calls), https://discuss.ai.google.dev/t/92785 (usage).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from tests.standins.base import CALLS, CREATED, DONE, PIECES, PROMPT_TOKENS, Reply, Request
from tests.standins.openai_words import Json, OpenAIWords


class Google(OpenAIWords):
    brand = "google"
    base_path = "/v1beta/openai"
    prefix = ""
    media_type = "text/event-stream"
    completions_served = False
    errors: ClassVar[dict[str, tuple[int, str, str]]] = {
        "context_length": (
            400,
            "The input token count (4096) exceeds the maximum number of tokens allowed (2048).",
            "INVALID_ARGUMENT",
        ),
        "unauthorized": (400, "API key not valid. Please pass a valid API key.", "INVALID_ARGUMENT"),
        "no_model": (404, "models/other is not found for API version v1main.", "NOT_FOUND"),
        "rate_limited": (429, "Resource has been exhausted (e.g. check quota).", "RESOURCE_EXHAUSTED"),
        "failing": (500, "An internal error has occurred.", "INTERNAL"),
        "loading": (503, "The model is overloaded. Please try again later.", "UNAVAILABLE"),
    }

    def refused(self, scenario: str, request: Request) -> Reply:
        status, message, name = self.errors[scenario]
        told: Json = {"code": status, "message": message, "status": name}
        if scenario == "unauthorized":
            kind = "type.googleapis.com/google.rpc.ErrorInfo"
            told["details"] = [{"@type": kind, "reason": "API_KEY_INVALID", "domain": "googleapis.com"}]
        return Reply(
            status=status, body=json.dumps([{"error": told}], indent=2).encode(), media_type="application/json"
        )

    def unknown_path(self) -> Reply:
        return Reply(status=404, body=b"", media_type="text/html")

    def model_card(self) -> Json:
        return {"id": f"models/{self.model}", "object": "model", "owned_by": "google", "display_name": "The model"}

    def error_event(self) -> bytes:
        status, message, name = self.errors["loading"]
        return (
            b"data: " + json.dumps([{"error": {"code": status, "message": message, "status": name}}]).encode() + b"\n\n"
        )

    def after_error(self) -> list[bytes]:
        return []

    def usage(self, completion_tokens: int) -> Json:
        return {
            "completion_tokens": completion_tokens,
            "prompt_tokens": PROMPT_TOKENS,
            "total_tokens": PROMPT_TOKENS + completion_tokens,
        }

    def chat_stream(self, request: Request, scenario: str) -> list[bytes]:
        finish = self.finish_reason(scenario, streamed=True)
        if scenario == "tools":
            said: list[Json] = [{"role": "assistant", "tool_calls": [call]} for call in _calls()]
        else:
            said = [{"role": "assistant", "content": "".join(part)} for part in (PIECES[:2], PIECES[2:4], PIECES[4:])]
        chunks = []
        for place, delta in enumerate(said):
            choice = {"delta": delta, "index": 0} | ({"finish_reason": finish} if place == len(said) - 1 else {})
            usage: Json = {}
            if scenario == "running_usage" or place == len(said) - 1:
                usage = {"usage": self.usage(self._tokens(scenario) * (place + 1) // len(said))}
            chunks.append(self.chunk(request, [choice]) | usage)
        return [*map(self.piece, chunks), DONE]

    def _tokens(self, scenario: str) -> int:
        return 12 if scenario == "tools" else len(PIECES)

    def chunk(self, request: Request, choices: list[Json], **more: Any) -> Json:
        return {
            "choices": choices,
            "created": CREATED,
            "id": "SKpbaNfgG_7rkdUP",
            "model": request.body["model"],
            "object": "chat.completion.chunk",
        } | more

    def finish_reason(self, scenario: str, *, streamed: bool) -> str:
        return "tool_calls" if scenario == "tools" and not streamed else "stop"

    def whole_chat(self, request: Request, scenario: str) -> Json:
        message: Json = {"role": "assistant"}
        message |= {"tool_calls": _calls()} if scenario == "tools" else {"content": "".join(PIECES)}
        choice = {
            "finish_reason": self.finish_reason(scenario, streamed=False),
            "index": 0,
            "message": message,
        }
        return self.chunk(request, [choice]) | {
            "object": "chat.completion",
            "usage": self.usage(self._tokens(scenario)),
        }


def _calls() -> list[Json]:
    return [
        {
            "extra_content": {"google": {"thought_signature": f"c2lnbmF0dXJl{place}"}},
            "function": {"arguments": "".join(call.arguments), "name": call.name},
            "id": call.id,
            "type": "function",
        }
        for place, call in enumerate(CALLS)
    ]
