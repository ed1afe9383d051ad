"""The life of a worker process: engine and door start together, serve, drain and end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import signal
import socket
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig
from worker.protocol.fleet import WorkerRecord

if TYPE_CHECKING:
    from worker.server.chat_template import ChatTemplate

_BACKLOG: Final = 2048
"""Connections that may wait to be accepted."""

log = structlog.get_logger("penstock.worker")


class ServeError(Exception):
    """The worker can't serve; the message says why and what to do."""


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    served_name: str
    host: str = "127.0.0.1"
    port: int = 8100
    """0: any free port."""
    fleet_token: str | None = None
    gateway_url: str | None = None
    pool: str | None = None
    advertise_url: str | None = None
    """Where the gateway reaches this worker; None: the address it listens on."""
    worker_id: str = ""
    drain_s: float = 8.0
    """On SIGTERM, how long running answers may go on."""
    idle_sleep_s: float | None = None
    """Without a request for so long, the engine is put to sleep; None: never."""
    tool_call_parser: str | None = None
    """How the model writes tool calls; None: guessed from its chat template."""


def is_loopback(host: str) -> bool:
    """Whether ``host`` can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; connections are refused until the worker is ready. Raises ServeError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, UnicodeError) as fault:
        bound.close()
        if not isinstance(fault, OSError):
            raise ServeError(f"Can't listen on {host}: it is no host's name. Choose another with --host.") from fault
        raise _taken(f"{host}:{port}", fault) from fault
    return bound


def accept(bound: socket.socket) -> None:
    """Let connections in. Raises ServeError: another process may have bound the address too, and been faster."""
    try:
        bound.listen(_BACKLOG)
    except OSError as fault:
        host, port = bound.getsockname()[:2]
        raise _taken(f"{host}:{port}", fault) from fault


def _taken(address: str, fault: OSError) -> ServeError:
    option = "--port" if fault.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
    return ServeError(f"Can't listen on {address}: {fault.strerror or fault}. Choose another with {option}.")


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _load_beside_the_engine(options: ServeOptions) -> ChatTemplate:
    """What the server needs of the model and of libraries, while the engine process loads the weights."""
    from worker.server.chat_template import UnusableModel, load_chat_template

    try:
        template = load_chat_template(Path(options.engine.model_path))
    except UnusableModel as fault:
        raise ServeError(str(fault)) from fault
    for module in ("app", "http", "registration"):
        import_module(f"worker.server.{module}")
    return template


async def serve(options: ServeOptions, began: float) -> bool:
    """Serve until told to stop by SIGTERM or SIGINT (True), or until the engine is dead (False).

    ``began``: ``time.monotonic()`` at the start of the process. Raises ServeError, EngineDead.
    """
    stop = asyncio.Event()
    with listen(options.host, options.port) as bound, _signals(stop):
        engine_starting = asyncio.ensure_future(EngineClient.start(options.engine))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            # The engine process takes the longest: everything else is loaded beside it.
            template = await asyncio.to_thread(_load_beside_the_engine, options)
            await asyncio.wait({engine_starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not engine_starting.done():
                return True
            engine = engine_starting.result()
        finally:
            engine_starting.cancel()
            stopping.cancel()
            await asyncio.gather(engine_starting, stopping, return_exceptions=True)
        try:
            return await _serve(options, bound, engine, template, stop, began)
        finally:
            await engine.close()


async def _serve(
    options: ServeOptions,
    bound: socket.socket,
    engine: EngineClient,
    template: ChatTemplate,
    stop: asyncio.Event,
    began: float,
) -> bool:
    # Here and not above: the web framework is loaded while the engine process starts.
    from worker.server.app import create_app
    from worker.server.door import Door
    from worker.server.http import HttpServer
    from worker.server.idle_sleep import sleep_when_idle
    from worker.server.kv_event_stream import KVEventStream
    from worker.server.registration import Registration
    from worker.server.service import ModelService

    url = url_of(bound)
    door = Door(options.fleet_token, token_required=not is_loopback(options.host))
    events: KVEventStream | None = None
    if options.engine.kv_events:
        events = KVEventStream()
        engine.on_kv_events = events.publish
    service = ModelService(engine, template, options.served_name, tool_format=options.tool_call_parser)
    server = HttpServer(create_app(service, door, events=events))
    registration: Registration | None = None
    if options.gateway_url and options.fleet_token:
        registration = Registration(
            options.gateway_url, options.fleet_token, lambda: _record(options, url, engine, door.draining)
        )
    accept(bound)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(bound))
        dying = tasks.create_task(engine.wait_dead())
        stopping = tasks.create_task(stop.wait())
        await server.wait_started()
        log.info(
            "ready",
            url=url,
            model=options.served_name,
            device=engine.info.device,
            context=engine.info.max_model_len,
            seconds=round(time.monotonic() - began, 1),
        )
        beating = tasks.create_task(registration.run()) if registration is not None else None
        resting = tasks.create_task(sleep_when_idle(engine, options.idle_sleep_s)) if options.idle_sleep_s else None
        await asyncio.wait({serving, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopped = engine.dead is None
        door.draining = True
        if resting is not None:
            resting.cancel()
        if stopped:
            if registration is not None:
                registration.beat_now()  # no new requests from now on
            log.info("draining", open_requests=engine.open_requests, limit_s=options.drain_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(options.drain_s):
                    await door.wait_idle()
        else:
            log.error("engine dead", reason=engine.dead)
        if registration is not None and beating is not None:
            beating.cancel()
            await asyncio.wait({beating})
            await registration.withdraw()
        if events is not None:
            events.close()
        # What still runs is told that it ends here.
        await engine.close()
        server.stop()
        stopping.cancel()
    return stopped


def _record(options: ServeOptions, url: str, engine: EngineClient, draining: bool) -> WorkerRecord:
    assert options.pool is not None
    return WorkerRecord(
        worker_id=options.worker_id,
        pool=options.pool,
        base_url=options.advertise_url or url,
        model=options.served_name,
        context_length=engine.info.max_model_len,
        running=engine.stats.running,
        waiting=engine.stats.waiting,
        kv_usage=engine.stats.kv_usage,
        draining=draining,
        version=version("penstock"),
        sleep_level=engine.sleep_level,
        block_size=engine.info.block_size,
        model_fingerprint=engine.info.model_fingerprint,
        kv_events=options.engine.kv_events,
    )


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
