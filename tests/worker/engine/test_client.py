import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from tests.worker.engine.toy_runner import EOS, VOCAB_SIZE, text_alone
from worker.engine.client import EngineClient, EngineDead, EngineStopped, QueueFull, RequestRejected
from worker.engine.config import EngineConfig
from worker.engine.messages import EngineRequest
from worker.engine.plan import SamplingParams

TOY = [sys.executable, str(Path(__file__).with_name("toy_runner.py"))]
Start = Callable[..., Awaitable[EngineClient]]


def config(*, max_running: int = 8, max_waiting: int = 8, **toy: Any) -> EngineConfig:
    toy |= {"max_running": max_running}
    return EngineConfig(model_path=json.dumps(toy), max_running=max_running, max_waiting=max_waiting)


def request(name: str, prompt: int = 10, max_tokens: int = 5, *, seed: int = 0, **more: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[(seed + 3 * i) % VOCAB_SIZE for i in range(prompt)],
        sampling=SamplingParams(seed=seed),
        max_tokens=max_tokens,
        **({"stop_token_ids": []} | more),
    )


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def starter(**toy: Any) -> EngineClient:
            return await stack.enter_async_context(await EngineClient.start(config(**toy), command=TOY))

        yield starter


async def collect(client: EngineClient, r: EngineRequest) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    reason = None
    async with client.generate(r) as outputs:
        async for output in outputs:
            assert reason is None
            tokens += output.token_ids
            reason = output.finish_reason
    return tokens, reason


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.005)


async def test_tells_what_the_engine_is(start: Start) -> None:
    client = await start(num_blocks=9, block_size=16)
    assert client.info.max_model_len == 128  # the pool is smaller than the model's context
    assert (client.info.num_blocks, client.info.block_size) == (9, 16)
    assert (client.info.vocab_size, client.info.eos_token_ids) == (VOCAB_SIZE, [EOS])
    assert client.info.device == "toy"
    assert client.dead is None


async def test_many_requests_at_once_each_get_their_own_text(start: Start) -> None:
    client = await start(num_blocks=30, block_size=4, max_running=8, max_waiting=100)
    requests = [request(f"r{i}", 1 + i, 1 + i, seed=i, stop_token_ids=[EOS]) for i in range(40)]
    results = await asyncio.gather(*(collect(client, r) for r in requests))
    for r, result in zip(requests, results, strict=True):
        assert result == text_alone(r.prompt_token_ids, r.sampling, r.max_tokens, [EOS])
    await until(lambda: client.stats.running == 0)
    assert client.stats.kv_usage == 0
    assert client.stats.steps > 0
    assert client.open_requests == 0


async def test_two_engines_side_by_side_do_not_meet(start: Start) -> None:
    first, second = await asyncio.gather(start(), start())
    a, b = request("same id", seed=1), request("same id", seed=2)
    results = await asyncio.gather(collect(first, a), collect(second, b))
    assert [tokens for tokens, _ in results] == [text_alone(r.prompt_token_ids, r.sampling, 5)[0] for r in (a, b)]
    assert first._directory != second._directory
    assert os.stat(first._directory).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("length", [30, 78, 79, 150])
async def test_a_folder_for_temporary_files_that_lies_too_deep_is_passed_over(
    length: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="p") as short:
        deep = Path(short) / ("d" * (length - len(short) - 1))
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        client = await start()
        directory = Path(client._directory)
        assert directory.parent == (deep if length < 79 else Path("/tmp"))
        assert (await collect(client, request("a")))[1] == "length"
        await client.close()
        await until(lambda: not directory.exists())


async def test_no_folder_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(EngineDead, match=r"no place for the engine's sockets.*TMPDIR"):
        await EngineClient.start(config(), command=TOY)


async def test_closing_the_iterator_ends_the_request_in_the_engine(start: Start) -> None:
    client = await start(num_blocks=2000, step_s=0.002)
    generation = client.generate(request("a", max_tokens=10_000))
    first = await anext(generation)
    assert first.token_ids
    assert first.finish_reason is None
    await generation.aclose()
    await until(lambda: client.open_requests == 0)
    assert client.stats.running == 0
    assert client.stats.kv_usage == 0
    assert client.stats.steps < 5000
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    await generation.aclose()
    assert await collect(client, request("a")) == text_alone(request("a").prompt_token_ids, SamplingParams(), 5)


async def test_a_request_that_nobody_ever_read_is_ended_too(start: Start) -> None:
    client = await start(num_blocks=2000, step_s=0.002)
    async with client.generate(request("a", max_tokens=10_000)):
        pass
    await until(lambda: client.open_requests == 0)
    assert client.stats.kv_usage == 0


async def test_closing_what_has_ended_unread_leaves_a_later_request_of_that_id_alone(start: Start) -> None:
    client = await start(step_s=0.001)
    first = client.generate(request("a", max_tokens=2))
    await until(lambda: not client.open_requests)
    second = collect(client, request("a", max_tokens=150, seed=1))
    task = asyncio.ensure_future(second)
    await until(lambda: client.open_requests)
    await first.aclose()
    assert (await task)[1] == "length"


async def test_closing_wakes_a_reader(start: Start) -> None:
    client = await start(step_s=5)
    generation = client.generate(request("a"))
    reader = asyncio.ensure_future(anext(generation, None))
    await asyncio.sleep(0.05)
    await generation.aclose()
    async with asyncio.timeout(2):
        assert await reader is None


async def test_a_wait_may_be_given_up_and_taken_up_again(start: Start) -> None:
    client = await start(step_s=0.05)
    r = request("a", max_tokens=6)
    tokens: list[int] = []
    timeouts = 0
    generation = client.generate(r)
    while True:
        try:
            async with asyncio.timeout(0.01):
                output = await anext(generation)
        except TimeoutError:
            timeouts += 1
        except StopAsyncIteration:
            break
        else:
            tokens += output.token_ids
    assert timeouts > 0
    assert tokens == text_alone(r.prompt_token_ids, r.sampling, 6)[0]


async def test_outputs_that_a_slow_reader_left_come_as_one(start: Start) -> None:
    client = await start(num_blocks=200)
    r = request("a", max_tokens=300)
    async with client.generate(r) as outputs:
        await until(lambda: client.open_requests == 0)
        output = await anext(outputs)
        assert (output.token_ids, output.finish_reason) == text_alone(r.prompt_token_ids, r.sampling, 300)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)


async def test_the_prefill_is_reported_to_those_who_ask_and_moves_the_stats(start: Start) -> None:
    client = await start(num_blocks=200, step_s=0.1)
    r = request("a", 1200, 2)
    async with client.generate(r, progress=True) as outputs:
        first = await anext(outputs)
        assert (first.token_ids, first.prefilled) in [([], 512), ([], 1024)]
        assert (client.stats.running, client.stats.waiting) == (1, 0)
        assert client.stats.kv_usage > 0.3
        assert client.stats.steps >= 1
        tokens: list[int] = []
        async for output in outputs:
            assert output.token_ids or output.prefilled == 1024
            tokens += output.token_ids
    assert tokens == text_alone(r.prompt_token_ids, r.sampling, 2)[0]
    async with client.generate(r) as outputs:
        async for output in outputs:
            assert output.token_ids


async def test_refuses_before_anything_is_sent(start: Start) -> None:
    client = await start(num_blocks=5, block_size=16, max_running=2, max_waiting=1, step_s=0.005)
    with pytest.raises(RequestRejected, match="together 65; this engine holds at most 64"):
        client.generate(request("a", 60, 5))
    with pytest.raises(RequestRejected, match="no tokens"):
        client.generate(request("a", 0))
    with pytest.raises(RequestRejected, match="max_tokens is 0"):
        client.generate(request("a", max_tokens=0))
    for outside in (-1, VOCAB_SIZE):
        bad = request("a")
        bad.prompt_token_ids[0] = outside
        with pytest.raises(RequestRejected, match="outside the vocabulary"):
            client.generate(bad)
    open_requests = [client.generate(request(name, max_tokens=50)) for name in "abc"]
    with pytest.raises(QueueFull, match="3 requests open"):
        client.generate(request("d"))
    with pytest.raises(RequestRejected, match="open already"):
        client.generate(request("a"))
    await open_requests[0].aclose()
    await until(lambda: client.open_requests < 3)
    assert (await collect(client, request("d")))[1] == "length"
    for generation in open_requests:
        await generation.aclose()


async def test_a_request_that_cannot_be_sent_holds_no_place(start: Start) -> None:
    client = await start(max_running=1, max_waiting=0)
    for _ in range(3):
        with pytest.raises(OverflowError):
            client.generate(request("a", priority=1 << 70))
    assert client.open_requests == 0
    assert (await collect(client, request("a")))[1] == "length"


async def test_a_request_that_only_the_engine_refuses_raises_for_its_reader(start: Start) -> None:
    client = await start(num_blocks=5, block_size=16)
    client.info = type(client.info)(
        max_model_len=1000, num_blocks=5, block_size=16, vocab_size=VOCAB_SIZE, eos_token_ids=[], device="toy"
    )
    with pytest.raises(RequestRejected, match="holds at most 64"):
        await collect(client, request("a", 60, 50))
    assert (await collect(client, request("b")))[1] == "length"


async def test_an_idle_engine_uses_no_processor_time(start: Start) -> None:
    client = await start()
    await collect(client, request("a"))
    assert client._process is not None
    process = psutil.Process(client._process.pid)
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(0.5)
    assert sum(process.cpu_times()[:2]) - before < 0.1


async def test_a_killed_engine_fails_every_request_clearly(start: Start) -> None:
    client = await start(num_blocks=5000, step_s=0.005)
    generations = [client.generate(request(f"r{i}", max_tokens=5000)) for i in range(3)]
    for generation in generations:
        await anext(generation)
    assert client._process is not None
    os.kill(client._process.pid, signal.SIGKILL)
    for generation in generations:
        with pytest.raises(EngineDead, match="killed by signal 9"):
            async for _ in generation:
                pass
    async with asyncio.timeout(5):
        await client.wait_dead()
    assert client.dead == "The engine process was killed by signal 9."
    await client.close()
    with pytest.raises(EngineDead) as late:
        client.generate(request("late"))
    assert not isinstance(late.value, EngineStopped)


async def test_a_step_that_raises_fails_every_request_and_ends_the_process(start: Start, capfd: Any) -> None:
    client = await start(fail_at_token=15)
    a, b = client.generate(request("a", max_tokens=20)), client.generate(request("b", 4, max_tokens=20))
    tokens: list[int] = []
    with pytest.raises(EngineDead, match=r"failed while running \(RuntimeError\)"):  # noqa: PT012
        async for output in a:
            tokens += output.token_ids
    assert len(tokens) == 4
    assert tokens == text_alone(request("a").prompt_token_ids, SamplingParams(), 4)[0]
    with pytest.raises(EngineDead):
        async for _ in b:
            pass
    assert client._process is not None
    assert await client._process.wait() == 1
    assert "RuntimeError: the toy broke" in capfd.readouterr().err


async def test_an_engine_that_cannot_load_says_why() -> None:
    bad = EngineConfig(model_path=json.dumps({"num_blocks": 1}))
    with pytest.raises(EngineDead, match=r"could not load .*none to give"):
        await EngineClient.start(bad, command=TOY)


async def test_an_engine_that_dies_while_loading_is_noticed() -> None:
    with pytest.raises(EngineDead, match="exited with status 3"):
        await EngineClient.start(config(), command=[sys.executable, "-c", "import sys; sys.exit(3)"])


async def test_close_fails_what_is_open_and_leaves_nothing_behind(start: Start) -> None:
    client = await start(num_blocks=5000, step_s=0.005)
    generation = client.generate(request("a", max_tokens=5000))
    await anext(generation)
    assert client._process is not None
    pid, directory = client._process.pid, Path(client._directory)
    await client.close()
    with pytest.raises(EngineStopped, match="shut down"):
        async for _ in generation:
            pass
    with pytest.raises(EngineStopped):
        client.generate(request("late"))
    assert not psutil.pid_exists(pid)
    await until(lambda: not directory.exists())
    await client.close()


async def test_signals_to_the_group_are_left_to_the_server(start: Start) -> None:
    client = await start()
    assert client._process is not None
    pid = client._process.pid
    assert os.getsid(pid) == pid
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    assert (await collect(client, request("a")))[1] == "length"


def test_serves_under_uvloop_too() -> None:
    async def main() -> None:
        async with await EngineClient.start(config(), command=TOY) as client:
            r = request("a", max_tokens=20)
            assert await collect(client, r) == text_alone(r.prompt_token_ids, r.sampling, 20)
            generation = client.generate(request("b", max_tokens=900))
            assert client._process is not None
            client._process.kill()
            with pytest.raises(EngineDead, match="killed by signal 9"):
                async for _ in generation:
                    pass

    uvloop.run(main())


def test_a_process_whose_server_is_gone_before_it_starts_ends_and_cleans_up(tmp_path: Path) -> None:
    directory = tmp_path / "engine"
    directory.mkdir()
    subprocess.run([*TOY, str(directory)], stdin=subprocess.DEVNULL, check=True, timeout=30)
    assert not directory.exists()


SERVER = """
import asyncio, sys
from tests.worker.engine.test_client import TOY, config, request
from worker.engine.client import EngineClient

async def main():
    client = await EngineClient.start(config(num_blocks=5000, step_s=0.01), command=TOY)
    generation = client.generate(request("a", max_tokens=50000))
    await anext(generation)
    print(client._process.pid, client._directory, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_engine_never_outlives_its_server() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid, directory = server.stdout.readline().split()
        engine = psutil.Process(int(pid))
        assert engine.is_running()
        server.kill()
    deadline = time.monotonic() + 20
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine runs on without its server"
        time.sleep(0.01)
    assert not Path(directory).exists()
