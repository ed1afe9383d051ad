"""Trying a backend: each failure is told with its remedy, in bounded time, and without a secret."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.backends import brands, trial
from gateway.backends.families import create_backends
from gateway.backends.fleet_worker import FleetWorker
from gateway.backends.transport import Transport
from gateway.backends.trial import Step, Trials
from gateway.clock import SystemClock
from gateway.routing.route import Endpoint
from gateway.tenants.backend_specs import BackendSpec, check_backend
from tests.gateway.conftest import Conversation, whole_event
from tests.ports import free_port
from tests.standins import base as standins
from tests.standins.anthropic import Anthropic
from tests.standins.base import StandIn
from tests.standins.google import Google
from tests.standins.llamacpp import LlamaCpp
from tests.standins.ollama import Ollama
from tests.standins.openai_hosted import OpenAIHosted
from tests.standins.sglang import SGLang
from tests.standins.trtllm import TensorRTLLM
from tests.standins.vllm import VLLM

KEY = "sk-very-secret-key-of-a-provider"


def endpoint(base_url: str, **more: Any) -> Endpoint:
    values: dict[str, Any] = {"family": "openai", "brand": "generic", "headers": {"authorization": f"Bearer {KEY}"}}
    return Endpoint("b", "pool", base_url, "b", 1000, **(values | more))


async def tried(target: Endpoint, *, step_s: float = 5.0, total_s: float = 20.0, **options: Any) -> list[Step]:
    async with Transport() as transport:
        backends = create_backends(FleetWorker(None), SystemClock())
        trials = Trials(transport, backends, step_s=step_s, total_s=total_s)
        steps = [step async for step in trials.steps(target, **options)]
    assert KEY not in repr(steps)
    return steps


def outcomes(steps: list[Step]) -> dict[str, bool]:
    return {step.name: step.passed for step in steps}


def models(*names: str) -> bytes:
    return json.dumps({"data": [{"id": name} for name in names]}).encode()


def server(chat: Callable[[Conversation], Any], listed: bytes = models("m")) -> Callable[[Conversation], Any]:
    """Lists ``listed`` and answers all else as ``chat`` does."""

    async def script(c: Conversation) -> None:
        if c.head.startswith("GET "):
            await c.status(200, listed)
        else:
            await chat(c)

    return script


async def answer(c: Conversation) -> None:
    if c.body.get("stream"):
        await c.begin()
        await c.event(
            json.dumps({"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}]}).encode()
        )
        await c.done()
    else:
        await c.status(200, whole_event())


async def test_usage_that_is_not_told_and_models_that_are_not_listed_are_no_failure(upstream: Any) -> None:
    running = await upstream(server(answer, models("other", KEY)))
    steps = await tried(endpoint(running.url), model="m")
    assert outcomes(steps) == {"connect": True, "models": True, "chat": True, "stream": True}
    assert "does not list m" in steps[1].detail
    assert "it lists other, ***" in steps[1].detail
    assert "usage told: 9 tokens in, 3 out" in steps[2].detail
    assert "usage is not told" in steps[3].detail
    posted = [each for each in running.seen if each.raw]
    assert all(each.body["max_tokens"] == 16 and each.headers["authorization"] == f"Bearer {KEY}" for each in posted)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, f"wrong key {KEY}", "API key"),
        (403, f"no access for {KEY}", "not allowed"),
        (404, "no such model", "--model"),
        (302, "", "base_url"),
        (429, "slow down", "limit"),
        (500, "oops", "its own log"),
        (400, f"no field x, {KEY}", "no field x, ***"),
    ],
)
async def test_a_refusal_is_told_with_its_remedy(upstream: Any, status: int, body: str, words: str) -> None:
    async def refuse(c: Conversation) -> None:
        error = json.dumps({"error": {"message": body, "type": "t", "param": None, "code": None}})
        await c.status(status, error.encode(), more="location: https://elsewhere.example.com\r\n")

    steps = await tried(endpoint((await upstream(server(refuse))).url))
    assert not steps[2].passed
    assert f"status {status}" in steps[2].detail
    assert words in steps[2].detail
    # No key, no chat; whatever else it was, streams may work.
    assert len(steps) == (3 if status == 401 else 4)


@pytest.mark.parametrize(
    "listed", [b"<html>", b"[1]", b'{"data": 1}', b"[" * 100_000, b'{"data": [{"id": 5}, 7]}', models()]
)
async def test_what_is_no_list_of_models_is_told(upstream: Any, listed: bytes) -> None:
    steps = await tried(endpoint((await upstream(server(answer, listed))).url))
    assert not steps[1].passed
    assert not outcomes(steps).get("chat", False)
    assert "model" in steps[-1].detail


async def test_answers_that_are_none_are_told(upstream: Any) -> None:
    async def nonsense(c: Conversation) -> None:
        await c.status(200, b"<html>", media_type="text/html")

    async def cut(c: Conversation) -> None:
        await c.begin()

    for script, words in ((nonsense, "brand"), (cut, "broke off")):
        steps = await tried(endpoint((await upstream(server(script))).url))
        assert outcomes(steps) == {"connect": True, "models": True, "chat": False, "stream": False}
        assert words in steps[3].detail


async def test_a_server_that_hangs_does_not_hold_it_up(upstream: Any) -> None:
    async def hang(c: Conversation) -> None:
        await c.wait_closed_by_peer(within_s=30)

    running = await upstream(hang)
    steps = await tried(endpoint(running.url), model="m", step_s=0.2, total_s=0.5)
    assert outcomes(steps) == {"connect": True, "models": False, "chat": False, "stream": False}
    assert "no answer within" in steps[1].detail


async def test_anthropics_api_is_tried_in_its_own_words(upstream: Any) -> None:
    async def script(c: Conversation) -> None:
        if c.head.startswith("GET /v1/models?limit=1000 "):
            assert c.headers["x-api-key"] == KEY
            await c.status(200, models("claude"))
        else:
            assert c.head.startswith("POST /v1/messages ")
            await c.status(529, b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}')

    claude = endpoint((await upstream(script)).url, family="anthropic", brand="anthropic", headers={"x-api-key": KEY})
    steps = await tried(claude, embeddings=True)
    assert outcomes(steps) == {"connect": True, "models": True, "chat": False, "stream": False, "embeddings": False}
    assert "status 529" in steps[2].detail
    assert "no embeddings" in steps[4].detail


BRANDS: list[type[StandIn]] = [VLLM, SGLang, TensorRTLLM, Ollama, LlamaCpp, OpenAIHosted, Google, Anthropic]


@pytest.mark.parametrize("brand", BRANDS, ids=lambda brand: brand.brand)
async def test_each_brand_passes_with_its_key_and_is_told_of_without(brand: type[StandIn]) -> None:
    async with brand(needs_key=True) as backend:
        declared = BackendSpec(name="b", pool="p", brand=brand.brand, base_url=backend.url, api_key=standins.KEY)
        declared = check_backend(declared, brands.BRANDS)
        assert declared.base_url == backend.url
        family = brands.BRANDS[brand.brand].family
        for key, passes in ((standins.KEY, True), (KEY, False)):
            headers = brands.BRANDS[brand.brand].key_headers(key)
            steps = await tried(endpoint(backend.url, brand=brand.brand, family=family, headers=headers))
            assert all(step.passed for step in steps) == passes, steps
            assert len(steps) == 4 if passes else "key" in steps[-1].detail
            assert standins.KEY not in repr(steps)


async def test_what_cannot_be_reached_is_told_at_once() -> None:
    for base_url, words in (
        (f"http://127.0.0.1:{free_port()}", "is the server up"),
        ("http://nowhere.invalid", "cannot be resolved"),
        ("http://" + "x" * 70 + ".example", "base_url"),
    ):
        (step,) = await tried(endpoint(base_url))
        assert not step.passed
        assert words in step.detail


async def test_what_is_wrong_with_tls_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def plain(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        (step,) = await tried(endpoint(f"https://127.0.0.1:{port}"))
    assert "no TLS" in step.detail

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(trial, "CONNECT_S", 0.2)
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        (step,) = await tried(endpoint(f"https://127.0.0.1:{port}"))
    assert "should begin with http" in step.detail
    monkeypatch.undo()

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    certificate = made.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "pem").write_bytes(private + certificate.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        (step,) = await tried(endpoint(f"https://localhost:{port}"))
    assert "not trusted" in step.detail
    assert "SSL_CERT_FILE" in step.detail
