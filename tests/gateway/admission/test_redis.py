from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis as redis_py
import uvloop

from gateway.admission.redis import PipelinedRedis, RedisError, RedisUnavailable, Script, load_script
from gateway.local.services import EmbeddedRedis
from tests.ports import free_port

ECHO = Script("echo", b"return {KEYS[1], ARGV[1]}", b"0" * 40)


@pytest.fixture
def redis_url(redis_url: str) -> str:
    if "+cluster" in redis_url:
        pytest.skip("of one server; test_redis_cluster.py is for clusters")
    return redis_url


@pytest.fixture
def own_redis(services_dir: Path) -> Iterator[EmbeddedRedis]:
    """A server of this test's own, to be stopped and hung."""
    service = EmbeddedRedis(services_dir / "redis")
    service.start()
    yield service
    if service.running():
        hang(service, False)
    service.stop()


def hang(service: EmbeddedRedis, hung: bool = True) -> None:
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP if hung else signal.SIGCONT)


async def test_replies_come_to_those_who_asked(redis_url: str) -> None:
    client = PipelinedRedis(redis_url, timeout_s=2)
    await client.command("SET", "text", b"\x00\r\n\xff")
    replies = await asyncio.gather(*(client.command("ECHO", str(number)) for number in range(2000)))
    assert replies == [str(number).encode() for number in range(2000)]
    assert await client.command("GET", "text") == b"\x00\r\n\xff"
    assert await client.command("GET", "nothing") is None
    await client.close()


async def test_commands_of_one_turn_leave_in_one_write(redis_url: str) -> None:
    client = PipelinedRedis(redis_url, timeout_s=2)
    await client.command("PING")
    connection = client._connection
    assert connection is not None
    assert connection._transport is not None
    written: list[bytes] = []
    write = connection._transport.write

    class Transport:
        def __getattr__(self, name: str) -> object:
            return getattr(transport, name)

        def write(self, data: bytes) -> None:
            written.append(data)
            write(data)

    transport = connection._transport
    connection._transport = Transport()  # type: ignore[assignment]
    await asyncio.gather(*(client.command("PING") for _ in range(50)))
    assert len(written) == 1
    await client.close()


async def test_an_error_reply_is_the_askers_alone(redis_url: str) -> None:
    client = PipelinedRedis(redis_url, timeout_s=2)
    await client.command("SET", "text", "a")
    good, bad, good_too = await asyncio.gather(
        client.command("GET", "text"), client.command("INCR", "text"), client.command("GET", "text"),
        return_exceptions=True,
    )  # fmt: skip
    assert (good, good_too) == (b"a", b"a")
    assert isinstance(bad, RedisError)
    await client.close()


async def test_a_script_unknown_to_redis_is_sent_whole(redis_url: str) -> None:
    script = Script("echo", ECHO.source, load_script("settle").sha)
    with redis_py.Redis.from_url(redis_url) as other:
        other.script_flush()
    client = PipelinedRedis(redis_url, timeout_s=2)
    replies = await asyncio.gather(*(client.run(script, ("k",), (number,)) for number in range(10)))
    assert replies == [[b"k", str(number).encode()] for number in range(10)]
    await client.close()


async def test_scripts_survive_a_flush_of_all_scripts(redis_url: str) -> None:
    opening = load_script("open")
    client = PipelinedRedis(redis_url, timeout_s=2, scripts=(opening,))
    with redis_py.Redis.from_url(redis_url) as other:
        epochs = []
        for _ in range(2):
            epoch, _ = await client.run(opening, ("{s}:epoch",), (0, 1000))
            epochs.append(epoch)
            other.script_flush()
    assert epochs[0] == epochs[1] != b""
    await client.close()


async def test_a_wrong_password_is_a_redis_that_cannot_be_used(own_redis: EmbeddedRedis) -> None:
    client = PipelinedRedis(f"redis://:wrong@127.0.0.1:{own_redis.port}/0", timeout_s=2)
    with pytest.raises(RedisUnavailable, match="WRONGPASS") as caught:
        await client.command("PING")
    assert ":wrong" not in str(caught.value)
    await client.close()


async def test_nobody_listens() -> None:
    client = PipelinedRedis(f"redis://127.0.0.1:{free_port()}/0", timeout_s=2)
    for _ in range(3):
        with pytest.raises(RedisUnavailable):
            await client.command("PING")
    await client.close()
    with pytest.raises(RedisUnavailable):
        await client.command("PING")


async def test_a_hung_redis_holds_nobody_longer_than_the_limit(own_redis: EmbeddedRedis) -> None:
    connected = 0

    def on_connected() -> None:
        nonlocal connected
        connected += 1

    client = PipelinedRedis(own_redis.url, timeout_s=0.4, on_connected=on_connected)
    await client.command("PING")
    hang(own_redis)
    for _ in range(3):  # on the connection that stands, then on new ones that get no answer either
        began = time.monotonic()
        replies = await asyncio.gather(*(client.command("PING") for _ in range(20)), return_exceptions=True)
        assert all(isinstance(reply, RedisUnavailable) for reply in replies)
        assert time.monotonic() - began < 5
    hang(own_redis, False)
    assert await client.command("PING") == b"PONG"
    assert connected == 2
    await client.close()


async def test_a_restarted_redis_is_found_again(own_redis: EmbeddedRedis) -> None:
    client = PipelinedRedis(own_redis.url, timeout_s=2)
    await client.command("SET", "a", "1")
    own_redis.kill()
    with pytest.raises(RedisUnavailable):
        await client.command("GET", "a")
    own_redis.start()
    assert await client.command("PING") == b"PONG"
    await client.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])  # uvloop runs timers before sockets
def test_a_gateway_held_up_itself_does_not_blame_redis(
    redis_url: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def scenario() -> None:
        client = PipelinedRedis(redis_url, timeout_s=0.2)
        await client.command("PING")
        asked = client.issue("PING")
        await asyncio.sleep(0)  # it leaves
        time.sleep(0.5)  # noqa: ASYNC251 - the loop stands still past the deadline, with the reply in the socket
        assert await asked == b"PONG"
        await client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


async def test_a_cancelled_call_does_not_shift_the_replies(redis_url: str) -> None:
    client = PipelinedRedis(redis_url, timeout_s=2)
    await client.command("PING")
    first = client.issue("ECHO", "first")
    second = client.issue("ECHO", "second")
    first.cancel()
    assert await second == b"second"
    await client.close()


async def test_a_peer_that_does_not_speak_the_protocol_is_left() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server:
        client = PipelinedRedis(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=2)
        with pytest.raises(RedisUnavailable):
            await client.command("PING")
        await client.close()
