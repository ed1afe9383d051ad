"""What the gateway itself refuses raises the SDKs' right classes, behind every door, streamed or whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import anthropic
import openai
import pytest

from tests.e2e.conformance.targets import Clients, House, clients_of
from tests.gateway.tenants.support import ACTOR, budget, requests_per_minute

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

QUESTION: Final[Any] = {"role": "user", "content": "Hi"}
Call = Callable[[], Awaitable[Any]]


def calls(clients: Clients, **fields: Any) -> Iterator[tuple[Any, Call]]:
    """One of each door, with the SDK that it belongs to."""
    ours, theirs = clients.openai, clients.anthropic
    model = {"model": "vllm"} | fields
    for stream in (False, True):
        more: Any = model | {"stream": stream}
        yield openai, lambda more=more: ours.chat.completions.create(messages=[QUESTION], **more)
        yield openai, lambda more=more: ours.completions.create(prompt="Hi", **more)
        yield openai, lambda more=more: ours.responses.create(input="Hi", **more)
        yield anthropic, lambda more=more: theirs.messages.create(messages=[QUESTION], max_tokens=9, **more)
    yield openai, lambda: ours.embeddings.create(input="Hi", **model)


async def check(clients: Clients, raised: str, status: int, **fields: Any) -> list[Any]:
    """What each door's call raises."""
    faults: list[Any] = []
    for sdk, call in calls(clients, **fields):
        with pytest.raises(getattr(sdk, raised)) as caught:
            await call()
        assert type(caught.value) is getattr(sdk, raised)
        assert caught.value.status_code == status
        assert caught.value.request_id
        assert caught.value.request_id == caught.value.response.headers["x-request-id"]
        faults.append(caught.value)
    return faults


@dataclass(frozen=True)
class Key:
    limits: tuple[Any, ...] = ()
    scopes: frozenset[str] = frozenset({"inference"})


async def clients_with(house: House, name: str, key: Key) -> Any:
    gateway = house.gateway
    await gateway.directory.create_tenant(ACTOR, name, limits=key.limits)
    secret, _ = await gateway.directory.create_key(ACTOR, name, "test", scopes=key.scopes)
    return clients_of(gateway.url, secret)


async def test_keys_and_models(standins: House) -> None:
    async with clients_of(standins.gateway.url, "sk-wrong") as strangers:
        await check(strangers, "AuthenticationError", 401)
        for list_models in (strangers.openai.models.list, strangers.anthropic.models.list):
            with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)):
                await list_models()
    async with await clients_with(standins, "reader", Key(scopes=frozenset({"usage:read"}))) as readers:
        await check(readers, "PermissionDeniedError", 403)
    await check(standins.clients, "NotFoundError", 404, model="nowhere")
    for retrieve in (standins.clients.openai.models.retrieve, standins.clients.anthropic.models.retrieve):
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)):
            await retrieve("nowhere")


async def test_limits(standins: House) -> None:
    async with await clients_with(standins, "hasty", Key((requests_per_minute(1),))) as hasty:
        await hasty.openai.chat.completions.create(model="vllm", messages=[QUESTION])
        faults = await check(hasty, "RateLimitError", 429)
        assert all(int(fault.response.headers["retry-after"]) > 0 for fault in faults)
    async with await clients_with(standins, "poor", Key((budget(1),))) as poor:
        faults = await check(poor, "RateLimitError", 429)
        assert {fault.type for fault in faults} == {"insufficient_quota", "billing_error"}
        assert {fault.response.headers["x-should-retry"] for fault in faults} == {"false"}


async def test_bodies(standins: House) -> None:
    await check(standins.clients, "BadRequestError", 400, model=7)
    # What no backend of the model can be asked.
    for create, asked in (
        (standins.clients.openai.completions.create, {"prompt": "Hi"}),
        (standins.clients.openai.embeddings.create, {"input": "Hi"}),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            await create(model="anthropic", **asked)  # type: ignore[operator]
        assert caught.value.status_code in (400, 404, 503)


async def test_a_client_that_waits_no_longer(standins: House) -> None:
    standin = standins.standins["sglang"]
    standin.pause_s = 5.0
    try:
        ours = standins.clients.openai.with_options(timeout=0.2)
        theirs = standins.clients.anthropic.with_options(timeout=0.2)
        with pytest.raises(openai.APITimeoutError):
            await ours.chat.completions.create(model="sglang", messages=[QUESTION], stream=True)
        with pytest.raises(openai.APITimeoutError):
            await ours.responses.create(model="sglang", input="Hi", stream=True)
        with pytest.raises(anthropic.APITimeoutError):
            await theirs.messages.create(model="sglang", max_tokens=9, messages=[QUESTION], stream=True)
    finally:
        standin.pause_s = 0.0
    # Nobody listens there.
    async with clients_of("http://127.0.0.1:1", "sk-any") as nowhere:
        for sdk, call in calls(nowhere):
            with pytest.raises(sdk.APIConnectionError):
                await call()
