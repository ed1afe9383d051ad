"""One chat completion on a WebSocket: each event of its stream is one text frame, and so is what ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from litestar.types import Send
from msgspec.structs import replace

from gateway.answerable import Answerable
from gateway.ask import Ask, Call, given
from gateway.http.client import Client, ClientGone
from gateway.http.inference import FAREWELL_S, SEND_GRACE_S, stopping
from gateway.http.openai.chat import ChatDoor
from gateway.ids import uuid7
from gateway.pipeline import Pipeline
from gateway.tenants.principal import Principal
from worker.protocol.errors import ApiError, bad_request, server_error
from worker.protocol.sse import DONE

_TRUE = msgspec.Raw(b"true")

_log = structlog.get_logger("gateway.request")


class Frames:
    """What is sent on one connection. Raises ClientGone if nobody is there any more."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def send(self, data: bytes) -> None:
        await self._transmit({"type": "websocket.send", "text": data.decode(errors="replace"), "bytes": None})

    async def error(self, error: ApiError) -> None:
        await self.send(error.encode())

    async def close(self, code: int, reason: str) -> None:
        with contextlib.suppress(ClientGone):
            await self._transmit({"type": "websocket.close", "code": code, "reason": reason})

    async def _transmit(self, message: Any) -> None:
        try:
            await self._send(message)
        except (OSError, RuntimeError) as fault:
            # The connection is closed; or it is being closed, and takes no more messages.
            raise ClientGone from fault


class ChatExchange:
    """A request and its answer."""

    def __init__(
        self,
        pipeline: Pipeline,
        client: Client,
        key: str | None,
        frames: Frames,
        raw: bytes,
        *,
        path: str,
        heads: bool,
    ) -> None:
        self._pipeline = pipeline
        self._client = client
        self._key = key
        self._frames = frames
        self._raw = raw
        self._path = path
        self._heads = heads
        self._request_id = uuid7()
        self._door = ChatDoor(self._request_id, client)
        self._answer: Answerable | None = None
        self._task: asyncio.Task[None] | None = None
        self._left = False
        self._over = asyncio.Event()

    def start(self, group: asyncio.TaskGroup, *, ended: Callable[[], None], too_slow: Callable[[], None]) -> None:
        """``ended`` is called when it is over, ``too_slow`` before that if the client does not take the answer."""
        self._task = group.create_task(self._run(too_slow))

        def over(_task: asyncio.Task[None]) -> None:
            self._over.set()
            ended()

        self._task.add_done_callback(over)

    def leave(self) -> None:
        """Nobody wants the answer any more. Before the backend is asked nothing can be cut short."""
        self._left = True
        if self._answer is not None and self._task is not None:
            self._answer.left()
            self._task.cancel()

    async def wait(self) -> None:
        await self._over.wait()

    async def _run(self, too_slow: Callable[[], None]) -> None:
        try:
            await self._serve(too_slow)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if self._left:
                return
            # The server stops; a client that does not read cannot delay it.
            with contextlib.suppress(TimeoutError, ClientGone):
                async with asyncio.timeout(FAREWELL_S):
                    await self._tell(stopping())
        except ApiError as error:
            with contextlib.suppress(ClientGone):
                await self._tell(error)
        except Exception:
            _log.exception("request_crashed", request_id=str(self._request_id))
            message = f"The gateway failed. The operator finds the cause under request id {self._request_id}."
            with contextlib.suppress(ClientGone):
                await self._tell(server_error(message))

    async def _serve(self, too_slow: Callable[[], None]) -> None:
        """Raises ApiError, ClientGone."""
        client = self._client
        call = Call(
            self._request_id,
            self._key,
            client.correlation(),
            self._read,
            path=self._path,
            traceparent=client.header(b"traceparent"),
            cache=client.header(b"x-penstock-cache"),
            cache_ttl=client.header(b"x-penstock-cache-ttl"),
            log=client.header(b"x-penstock-log"),
        )
        self._answer = answer = self._door.deliver(await self._pipeline.serve(call))
        limit = asyncio.get_running_loop().call_later(answer.timeout_s + SEND_GRACE_S, too_slow)
        try:
            async with answer:
                if self._left:
                    answer.left()
                else:
                    await self._stream(answer)
        finally:
            limit.cancel()

    async def _read(self, principal: Principal) -> Ask:
        ask = await self._door.ask(self._raw, principal)
        if given(ask.body, "stream") and not ask.stream:
            raise bad_request("A WebSocket streams its answers. Leave 'stream' out.", param="stream")
        body = ask.body | {"stream": _TRUE}
        return replace(ask, body=body, chat=body, stream=True)

    async def _stream(self, answer: Answerable) -> None:
        events = await answer.events()
        try:
            await self._head(200, answer.headers())
            while True:
                for data in events:
                    await self._frames.send(data)
                if answer.complete:
                    break
                events = await answer.events()
            await self._frames.send(DONE)
        except ClientGone:
            answer.left()
            raise

    async def _tell(self, error: ApiError) -> None:
        """An error, behind which nothing comes."""
        if self._answer is None:
            await self._head(error.status, list(error.headers.items()))
        await self._frames.error(error)

    async def _head(self, status: int, headers: list[tuple[str, str]]) -> None:
        if not self._heads:
            return
        told = {"x-request-id": str(self._request_id), **dict(headers)}
        await self._frames.send(msgspec.json.encode({"type": "response", "status": status, "headers": told}))
