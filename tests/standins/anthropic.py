"""api.anthropic.com.

- Events are named, and their data's ``type`` says the same. ``message_start`` holds the message without its content and
  ``usage`` with the input's tokens and the few of the output that are there; a ``ping`` follows the first block's
  start; ``message_delta`` tells the stop reason, and ``usage`` once more with all of the output; ``message_stop`` ends
  it, without ``[DONE]``.
- Errors have ``type: error`` and a ``request_id``; in a stream they are an event, an overload often the one behind
  ``message_start``. 529 is for overloads, ``retry-after`` comes with a 429. Lack of credit is a bad request.
- ``anthropic-version`` is a must, and so is each field's being known.

References: https://platform.claude.com/docs/en/build-with-claude/streaming,
https://platform.claude.com/docs/en/api/errors
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from tests.standins import base
from tests.standins.anthropic_checks import problem
from tests.standins.anthropic_words import REQUEST_ID, encoded, error, events_of, message, on_the_wire
from tests.standins.base import EVENT_STREAM, Reply, Request, StandIn


class Anthropic(StandIn):
    """Scenarios: ``text``, ``tools``, ``reasoning``, ``keep_alive`` (pings before it); those of ``errors``; faults in a
    stream: ``error_first`` (behind ``message_start``), ``error_in_stream``, ``cut``."""

    brand = "anthropic"
    errors: ClassVar[dict[str, tuple[int, str, str]]] = {
        "context_length": (400, "invalid_request_error", "prompt is too long: 208310 tokens > 200000 maximum"),
        "no_credit": (
            400,
            "invalid_request_error",
            "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing to upgrade.",
        ),
        "unauthorized": (401, "authentication_error", "invalid x-api-key"),
        "no_permission": (403, "permission_error", "Your API key does not have permission to use the resource."),
        "no_model": (404, "not_found_error", "model: other"),
        "too_large": (413, "request_too_large", "Request exceeds the maximum size"),
        "rate_limited": (429, "rate_limit_error", "This request would exceed your organization's rate limit of 50."),
        "failing": (500, "api_error", "Internal server error"),
        "loading": (529, "overloaded_error", "Overloaded"),
    }

    def answer(self, request: Request, scenario: str) -> Reply:
        if self.needs_key and request.headers.get("x-api-key") != base.KEY:
            return self.refused("unauthorized")
        if scenario in self.errors:
            return self.refused(scenario)
        if request.headers.get("anthropic-version") != "2023-06-01":
            return _refusal(400, "invalid_request_error", "anthropic-version: header is required")
        if request.path.startswith("/v1/models"):
            listed = [{"type": "model", "id": "claude-sonnet-4-6", "display_name": "Claude Sonnet 4.6"}]
            return _whole({"data": listed, "has_more": False})
        if request.path != "/v1/messages":
            return _refusal(404, "not_found_error", "Not Found")
        if (wrong := problem(request.body)) is not None:
            return _refusal(400, "invalid_request_error", wrong)
        says = self.says(scenario)
        return self.streamed(says, scenario) if request.body.get("stream") else _whole(says)

    def scenario_of(self, request: Request) -> str:
        scenario = super().scenario_of(request)
        # Results of tools are a user's, too.
        brought = scenario == "tools" and b'"tool_result"' in request.raw
        return "text" if brought and self.scenario is None else scenario

    def refused(self, scenario: str) -> Reply:
        status, kind, text = self.errors[scenario]
        return _refusal(status, kind, text, **({"retry-after": "7"} if status == 429 else {}))

    def says(self, scenario: str) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": base.TEXT}]
        if scenario == "tools":
            content = [
                {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads("".join(call.arguments))}
                for call in base.CALLS
            ]
        elif scenario == "reasoning":
            content.insert(
                0, {"type": "thinking", "thinking": "".join(base.REASONING), "signature": "EqoBCkgIARABGAIi"}
            )
        usage = {
            "input_tokens": base.PROMPT_TOKENS - base.CACHED_TOKENS,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": base.CACHED_TOKENS,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 5 * len(content),
            "service_tier": "standard",
        }
        return message(*content, stop_reason="tool_use" if scenario == "tools" else "end_turn", usage=usage)

    def streamed(self, says: dict[str, Any], scenario: str) -> Reply:
        events = events_of(says)
        overloaded = error("overloaded_error", "Overloaded")
        if scenario == "error_first":
            events = [events[0], overloaded]
        elif scenario == "error_in_stream":
            events = [*events[:4], overloaded]
        elif scenario == "cut":
            events = events[:5]
        elif scenario == "keep_alive":
            events = [events[0], {"type": "ping"}, {"type": "ping"}, *events[1:]]
        pieces = [on_the_wire(event) for event in events]
        return Reply(pieces=pieces, media_type=EVENT_STREAM, headers={"request-id": REQUEST_ID}, cut=scenario == "cut")


def _whole(body: dict[str, Any]) -> Reply:
    return Reply(body=encoded(body), headers={"request-id": REQUEST_ID})


def _refusal(status: int, kind: str, text: str, **headers: str) -> Reply:
    return Reply(status=status, body=encoded(error(kind, text)), headers={"request-id": REQUEST_ID, **headers})
