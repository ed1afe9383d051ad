"""The doors of completions and embeddings over real sockets; only the backend is scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from gateway.tenants.specs import LimitSpec
from tests.gateway.http.openai.test_chat import client_of, error_of, events_of, eventually
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway
from tests.gateway.tenants.support import ACTOR
from worker.protocol.usage import MeterReading, encode_meter

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
MOST = 1_000_000
PROMPT: dict[str, Any] = {"model": "m", "prompt": "Once"}
INPUT: dict[str, Any] = {"model": "m", "input": "Once"}
VECTOR = '{"object":"embedding","index":0,"embedding":[1e-05,-0.0,0.10000000149011612, 1.0]}'
BASE64 = '{"object":"embedding","index":1,"embedding":"zczMPQAAgD8="}'
LIST = (
    f'{{"object":"list","data":[{VECTOR},{BASE64}],"model":"internal","usage":{{"prompt_tokens":4,"total_tokens":4}}}}'
)


def piece(text: str, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "internal"}
    return json.dumps(head | {"choices": [choice]} | more).encode()


async def answers(c: Any) -> None:
    """As our worker does, metered."""
    await c.begin()
    if "/v1/embeddings" in c.head:
        await c.send_piece(encode_meter(MeterReading(4, 0)))
        await c.event(LIST.encode())
    elif c.body.get("stream"):
        await c.send_piece(encode_meter(MeterReading(3, 1)))
        await c.event(piece(" upon"))
        await c.send_piece(encode_meter(MeterReading(3, 2)))
        await c.event(piece(" a"))
    else:
        await c.send_piece(encode_meter(MeterReading(3, 2)))
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        await c.event(piece(" upon a", usage=usage))
    await c.done()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    # Far more than all of it takes: it is there to make prompts be counted, and tells what was reserved.
    tokens = LimitSpec(metric="tokens", window="day", amount=MOST)
    async with shared_gateway(databases, redis_server, tmp_path_factory.mktemp("gateway"), limits=[tokens]) as made:
        yield made


@pytest.fixture
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    yield await shared.view()
    shared.check()


@pytest.fixture
def upstream(shared: Shared) -> Any:
    return shared.script


async def test_each_api_goes_to_its_own_path_and_is_metered(gateway: Any, upstream: Any) -> None:
    server = await upstream(answers)
    await gateway.register(server)
    asked = PROMPT | {"suffix": ".", "logprobs": 1, "odd": {"kept": [1]}}
    async with client_of(gateway) as client:
        whole = await client.post(COMPLETIONS, json=asked)
        stream = await client.post(COMPLETIONS, json=asked | {"stream": True, "max_tokens": 7})
        vectors = await client.post(EMBEDDINGS, json=INPUT | {"input": ["a", "b"], "dimensions": 4, "odd": 1})
    assert whole.json()["choices"][0]["text"] == " upon a"
    assert whole.headers["x-penstock-cost-usd"] == "0.000007000"
    *events, done = events_of(stream.text)
    assert [json.loads(event)["choices"][0]["text"] for event in events] == [" upon", " a"]
    assert {json.loads(event)["model"] for event in events} == {whole.json()["model"], "m"} == {"m"}
    assert done == "[DONE]"
    assert [call.head.split()[1] for call in server.seen] == [COMPLETIONS, COMPLETIONS, EMBEDDINGS]
    # Without a cap a completion has 16 tokens; an embedding has none to be capped.
    assert server.seen[0].body == asked | {"max_tokens": 16}
    assert server.seen[0].headers["x-penstock-clamp-output"] == "1"
    assert server.seen[1].body == asked | {"stream": True, "max_tokens": 7}
    assert server.seen[2].body == INPUT | {"input": ["a", "b"], "dimensions": 4, "odd": 1}
    assert "x-penstock-clamp-output" not in server.seen[2].headers
    # Vectors are not read: what is in them arrives as it was sent.
    assert vectors.text == LIST.replace('"internal"', '"m"')
    rows = await gateway.rows(3)
    assert [(row.api, row.prompt_tokens, row.completion_tokens, row.streamed) for row in rows] == [
        ("completions", 3, 2, False),
        ("completions", 3, 2, True),
        ("embeddings", 4, 0, False),
    ]
    assert [row.charged_nano_usd for row in rows] == [7_000, 7_000, 4_000]
    assert {(row.status, row.usage_source, row.over_bound) for row in rows} == {("ok", "backend", False)}


async def test_the_official_sdk_is_content(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(answers))
    async with openai.AsyncOpenAI(api_key=gateway.key, base_url=gateway.url + "/v1", max_retries=0) as client:
        whole = await client.completions.create(model="m", prompt="Once")
        assert (whole.choices[0].text, whole.usage and whole.usage.completion_tokens) == (" upon a", 2)
        stream = await client.completions.create(model="m", prompt="Once", stream=True)
        assert "".join([event.choices[0].text async for event in stream]) == " upon a"
        vectors = await client.embeddings.create(model="m", input=["a", "b"], encoding_format="float")
        assert vectors.data[0].embedding == [1e-05, -0.0, 0.10000000149011612, 1.0]
        # The SDK asks for base64 by itself, and decodes it.
        vectors = await client.embeddings.create(model="m", input=["a", "b"])
        assert vectors.data[1].embedding == [0.10000000149011612, 1.0]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="m", input=[])
        assert (caught.value.param, caught.value.code) == ("input", "empty_array")
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="Once")
    await gateway.rows(4)


async def test_what_is_reserved_grows_with_prompts_and_choices(gateway: Any, upstream: Any) -> None:
    await upstream(answers)
    async with client_of(gateway) as client:

        async def reserved(path: str, body: dict[str, Any]) -> int:
            """Over what is spent when nothing runs."""
            nothing = await client.post(COMPLETIONS, json=PROMPT | {"prompt": [[1]], "max_tokens": 1})
            answer = await client.post(path, json=body)
            assert answer.status_code == nothing.status_code == 200, answer.text
            before = int(nothing.headers["x-ratelimit-remaining-tokens"]) + 1 + 32 + 1 - 5
            return before - int(answer.headers["x-ratelimit-remaining-tokens"])

        ids = [[1, 2], [3]]
        assert await reserved(COMPLETIONS, PROMPT | {"prompt": ids, "max_tokens": 10}) == 3 + 2 * 32 + 20
        asked = PROMPT | {"prompt": ids, "max_tokens": 10, "n": 2, "best_of": 3}
        assert await reserved(COMPLETIONS, asked) == 3 + 2 * 32 + 2 * 3 * 10
        assert await reserved(EMBEDDINGS, INPUT | {"input": ids}) == 3 + 2 * 32
        # The context, of 1000 tokens, holds for each.
        assert await reserved(EMBEDDINGS, INPUT | {"input": ["x" * 3000] * 2}) == 2000
    await gateway.rows(8)


async def test_the_context_of_a_key_holds_for_each_prompt(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(answers))
    narrow, _ = await gateway.directory.create_key(ACTOR, "acme", "narrow", max_context_tokens=50)
    async with client_of(gateway, narrow) as client:
        for count, status in ((10, 200), (30, 400)):
            answer = await client.post(EMBEDDINGS, json=INPUT | {"input": [[1] * count] * 5})
            assert answer.status_code == status, answer.text
        assert error_of(answer)["code"] == "context_length_exceeded"
        assert error_of(answer)["param"] == "input"
        assert "the longest prompt has up to 62 tokens" in error_of(answer)["message"]
        answer = await client.post(COMPLETIONS, json=PROMPT | {"prompt": [[1] * 10] * 5, "max_tokens": 9})
        assert error_of(answer)["param"] == "max_tokens"
    await gateway.rows(1)


async def test_a_hang_up_on_a_whole_embedding_closes_the_backend(gateway: Any, upstream: Any) -> None:
    took: list[float] = []

    async def thinks(c: Any) -> None:
        await c.begin()
        took.append(await c.wait_closed_by_peer())

    server = await upstream(thinks)
    await gateway.register(server)
    async with client_of(gateway) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(EMBEDDINGS, json=INPUT, timeout=0.3)
    await eventually(lambda: bool(took))
    assert took[0] < 2.0
    (row,) = await gateway.rows()
    assert (row.status, row.api, row.completion_tokens) == ("aborted", "embeddings", 0)


async def test_a_repeated_embedding_runs_once(gateway: Any, upstream: Any) -> None:
    server = await upstream(answers)
    await gateway.register(server)
    async with client_of(gateway) as client:
        for path, body in ((EMBEDDINGS, INPUT), (COMPLETIONS, PROMPT | {"stream": True})):
            told = [await client.post(path, json=body, headers={"idempotency-key": "once"}) for _ in range(2)]
            assert told[0].text == told[1].text
            assert "idempotent-replayed" in told[1].headers
    assert len(server.seen) == 2
    rows = await gateway.rows(4)
    assert [(row.status, row.api) for row in rows] == [
        ("ok", "embeddings"),
        ("replayed", "embeddings"),
        ("ok", "completions"),
        ("replayed", "completions"),
    ]
    assert rows[1].charged_nano_usd == rows[3].charged_nano_usd == 0


async def test_a_cut_and_a_refusal_are_told(gateway: Any, upstream: Any) -> None:
    async def cut(c: Any) -> None:
        await c.begin()
        await c.event(piece(" upon"))
        c.reset()

    async def refuses(c: Any) -> None:
        await c.status(400, b'{"error":{"message":"No.","type":"invalid_request_error","param":"input","code":null}}')

    await gateway.register(await upstream(cut, refuses))
    async with client_of(gateway) as client:
        events = events_of((await client.post(COMPLETIONS, json=PROMPT | {"stream": True})).text)
        assert json.loads(events[-1])["error"]["code"] == "backend_disconnected"
        answer = await client.post(EMBEDDINGS, json=INPUT)
    assert (answer.status_code, error_of(answer)["message"], error_of(answer)["param"]) == (400, "No.", "input")
    assert [row.status for row in await gateway.rows(2)] == ["failed", "failed"]


async def test_what_no_backend_tells_is_estimated_for_all_prompts(gateway: Any, upstream: Any) -> None:
    async def silent(c: Any) -> None:
        await c.begin()
        await c.event(b'{"object":"list","data":[],"model":"m"}')
        await c.done()

    await upstream(silent)
    async with client_of(gateway) as client:
        assert (await client.post(EMBEDDINGS, json=INPUT | {"input": ["x" * 3000] * 2})).status_code == 200
    (row,) = await gateway.rows()
    # More than one context, of 1000 tokens, and not more than was reserved for.
    assert 1500 < row.prompt_tokens <= 2000
    assert (row.completion_tokens, row.usage_source, row.over_bound) == (0, "estimated", False)
