from __future__ import annotations

import json

from worker.protocol.errors import ApiError, context_length_exceeded, model_not_found, overloaded, unauthorized


def test_the_envelope_is_openais() -> None:
    body = json.loads(ApiError(400, "No.", param="n").encode())
    assert body == {"error": {"message": "No.", "type": "invalid_request_error", "param": "n", "code": None}}


def test_codes_that_sdks_and_clients_look_for() -> None:
    assert (unauthorized("x").status, unauthorized("x").body.code) == (401, "invalid_api_key")
    assert (model_not_found("m").status, model_not_found("m").body.code) == (404, "model_not_found")
    assert context_length_exceeded("x").body.code == "context_length_exceeded"
    refused = overloaded("Busy.", retry_after_s=3)
    assert (refused.status, refused.headers["retry-after"]) == (503, "3")


def test_a_long_name_is_not_told_whole() -> None:
    assert len(model_not_found("m" * 1_000_000).body.message) < 400
    assert "org/model" in model_not_found("org/model").body.message
