"""The server's side of the engine: starts the engine process, hands it requests, gives each its own outputs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import zmq
import zmq.asyncio

from worker.engine.config import EngineConfig
from worker.engine.generation import Generation
from worker.engine.messages import (
    INPUT_SOCKET,
    OUTPUT_SOCKET,
    AbortRequests,
    Control,
    ControlDone,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Failed,
    KVEventBatch,
    Ready,
    encoder,
    from_engine_decoder,
)
from worker.engine.request import (
    ControlRefused,
    EngineError,
    GrammarFailed,
    QueueFull,
    QueueTimeout,
    RequestRejected,
    check_request,
)
from worker.execution import threads
from worker.protocol.kv_events import KVEvent

__all__ = [
    "ControlRefused",
    "EngineClient",
    "EngineDead",
    "EngineError",
    "EngineStopped",
    "Generation",
    "GrammarFailed",
    "QueueFull",
    "QueueTimeout",
    "RequestRejected",
]

ENGINE_COMMAND = (sys.executable, "-m", "worker.engine.process")
_EXIT_TIMEOUT_S = 5.0
_LAST_WORDS_TIMEOUT_S = 0.5
_DIRECTORY_PREFIX = "penstock-engine-"
_LONGEST_SOCKET_PATH = zmq.IPC_PATH_MAX_LEN


class EngineDead(EngineError):
    """The engine process ended, or never became ready. Nothing runs any more: the server should exit."""


class EngineStopped(EngineDead):
    """``EngineClient.close`` ended the engine: its own server is stopping."""


class EngineClient:
    """One engine process and the requests open in it.

    Belongs to the event loop that started it. The process cannot outlive this one: it watches its standard input,
    which closes however this process ends. It ignores SIGINT and SIGTERM: ending it is ``close``'s business.
    """

    info: EngineInfo
    """What the engine is; set once ``start`` has returned."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._config = config
        self._command = command
        self.stats = EngineStats()
        """The engine after its latest step."""
        self.on_kv_events: Callable[[list[KVEvent]], None] | None = None
        """Called with each batch of changes of the prefix cache, if the configuration asks for them."""
        self._controls: dict[int, tuple[asyncio.Future[None], Callable[[int, str | None], None]]] = {}
        self._next_control = 0
        self._asleep: tuple[int, int] | None = None
        """Number and level of the ``sleep`` that the engine obeys or is about to; None while it is to be awake."""
        self._waking: tuple[int, asyncio.Future[None]] | None = None
        """Number of the ``wake`` under way, and its end."""
        self._wanted_awake = 0
        """How many wait in ``ensure_awake``."""
        self._idle_since = asyncio.get_running_loop().time()
        self._open: dict[str, Generation] = {}
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._stopped = False
        self._process: asyncio.subprocess.Process | None = None
        self._directory = _make_directory()
        self._context = zmq.Context()
        self._receiver = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        # A plain socket: what is sent never waits, for open requests bound what can be in it.
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.set_hwm(0)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, config: EngineConfig, *, command: Sequence[str] = ENGINE_COMMAND) -> EngineClient:
        """Spawn the engine process and wait until its model is loaded. Raises EngineDead with the reason.

        ``command`` is for tests that bring a process of their own; the instance's directory is appended to it.
        """
        client = cls(config, command)
        try:
            await client._launch()
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def open_requests(self) -> int:
        """Requests that the engine has not finished, those being aborted included."""
        return len(self._open)

    @property
    def max_open(self) -> int:
        """Most requests that may be open at once."""
        return self._config.max_running + self._config.max_waiting

    @property
    def dead(self) -> str | None:
        """Why the engine is gone; None while it lives."""
        return self._dead.result() if self._dead.done() else None

    def generate(self, request: EngineRequest, *, progress: bool = False) -> Generation:
        """Hand ``request`` to the engine at once; iterate the result for its outputs.

        ``progress``: whether outputs without tokens come too, which say how far the prompt is computed.

        Raises, before anything is sent: RequestRejected (it could never run), QueueFull (``max_running`` +
        ``max_waiting`` requests are open), EngineDead.
        """
        if self._dead.done():
            raise self._end()
        check_request(request, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        if request.request_id in self._open:
            raise RequestRejected(f"A request with id {request.request_id!r} is open already.")
        if len(self._open) >= self.max_open:
            raise QueueFull(f"The engine already has {self.max_open} requests open. Try again in a moment.")
        message = encoder.encode(request)  # first: what can't be sent must not hold a place
        if self._asleep is not None:
            self._wake(self._asleep[0])  # obeyed before the request
        generation = Generation(request.request_id, abort=self._abort, progress=progress)
        self._open[request.request_id] = generation
        self._sender.send(message, zmq.NOBLOCK)
        return generation

    @property
    def sleep_level(self) -> int:
        """Level of the sleep that the engine is in, falls into or wakes from; 0: awake."""
        return self._asleep[1] if self._asleep is not None else 0

    @property
    def idle_s(self) -> float:
        """Seconds since the last request ended or somebody asked for an engine that is awake; 0 while requests run, or
        somebody waits for it to wake: whoever sends an idle engine to sleep must not be faster than they."""
        if self._open or self._waking or self._wanted_awake:
            return 0.0
        return asyncio.get_running_loop().time() - self._idle_since

    async def sleep(self, level: int = 1) -> None:
        """Give up the KV pool and the weights (see ``Control``). Raises ControlRefused, EngineDead."""

        def settle(number: int, error: str | None) -> None:
            if error is not None and self._asleep == (number, level):
                self._asleep = before

        number, done = self._control("sleep", level, settle)
        before, self._asleep = self._asleep, (number, level)
        await asyncio.shield(done)

    async def ensure_awake(self) -> None:
        """Return once the engine is awake; at once if nothing put it to sleep. Raises ControlRefused, EngineDead.

        Those who wait together share one wake. A sleep under way is let end, then undone. Await it before
        ``generate``: that wakes a sleeping engine too, but nobody would hear that it can't be woken.
        """
        if self._dead.done():
            raise self._end()
        self._wanted_awake += 1
        try:
            while self._asleep is not None:
                # Whoever waits may leave; the wake goes on for the others.
                await asyncio.shield(self._wake(self._asleep[0]))
        finally:
            self._wanted_awake -= 1
        self._idle_since = asyncio.get_running_loop().time()

    def _wake(self, sleep: int) -> asyncio.Future[None]:
        """The end of the wake that undoes the sleep of this number; it is sent now if it was not before."""
        if self._waking is not None and self._waking[0] > sleep:
            return self._waking[1]

        def settle(number: int, error: str | None) -> None:
            self._idle_since = asyncio.get_running_loop().time()
            if self._waking is not None and self._waking[0] == number:
                self._waking = None
            if error is None and self._asleep is not None and self._asleep[0] < number:
                self._asleep = None

        self._waking = self._control("wake", 0, settle)
        return self._waking[1]

    async def reset_cache(self) -> None:
        """Forget every cached block that is not in use. Raises ControlRefused, EngineDead."""
        await asyncio.shield(self._control("reset_cache", 0, lambda number, error: None)[1])

    def _control(
        self, action: Literal["sleep", "wake", "reset_cache"], level: int, settle: Callable[[int, str | None], None]
    ) -> tuple[int, asyncio.Future[None]]:
        """Send it now; its number, above those before, and its end, which nobody may cancel. Raises EngineDead.

        ``settle`` is called with the number and the engine's refusal when it has answered, before anybody who waits.
        """
        if self._dead.done():
            raise self._end()
        self._next_control += 1
        control = Control(self._next_control, action, level)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._controls[control.id] = (done, settle)
        # Its fault counts as heard, though whoever asked may have left.
        done.add_done_callback(lambda done: done.exception())
        self._sender.send(encoder.encode(control), zmq.NOBLOCK)
        return control.id, done

    async def wait_dead(self) -> None:
        """Return once the engine is gone, expected or not; ``dead`` then says why."""
        await asyncio.wait([self._dead])

    async def close(self) -> None:
        """End the engine process, whatever it does; open generations raise EngineStopped."""
        self._stopped |= not self._dead.done()
        self._die("The engine was shut down.")
        process = self._process
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            if process.returncode is None:
                try:
                    async with asyncio.timeout(_EXIT_TIMEOUT_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._sender.close(linger=0)
        self._receiver.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _launch(self) -> None:
        self._receiver.bind(f"ipc://{self._directory}/{OUTPUT_SOCKET}")
        # A session of its own: a signal to the server's whole group leaves the engine to the server, which drains.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            self._directory,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=threads.environment(self._config.threads, os.environ),
        )
        self._tasks = [
            asyncio.create_task(self._receive(), name="engine-receive"),
            asyncio.create_task(self._watch(self._process), name="engine-watch"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_done)
        stdin = self._process.stdin
        assert stdin is not None
        # A process that is gone already is the watcher's to report, with its reason.
        with contextlib.suppress(ConnectionError):
            stdin.write(msgspec.json.encode(self._config) + b"\n")
            await stdin.drain()
        outcome: list[asyncio.Future[Any]] = [self._ready, self._dead]
        await asyncio.wait(outcome, return_when=asyncio.FIRST_COMPLETED)
        if self._dead.done():
            raise EngineDead(self._dead.result())
        self.info = self._ready.result()
        self._sender.connect(f"ipc://{self._directory}/{INPUT_SOCKET}")

    async def _receive(self) -> None:
        """Hand on what the engine says, until its last words."""
        while not self._dead.done():
            message = from_engine_decoder.decode(await self._receiver.recv())
            if isinstance(message, Failed):
                self._die(message.message)
                return
            if isinstance(message, Ready):
                self._ready.set_result(message.info)
            elif self._dead.done():
                return  # nobody is left to hear it
            elif isinstance(message, ControlDone):
                self._control_done(message)
            elif isinstance(message, KVEventBatch):
                if self.on_kv_events is not None:
                    self.on_kv_events(message.events)
            else:
                self.stats = message.stats
                for output in message.outputs:
                    generation = self._open[output.request_id]
                    if output.finish_reason is not None:
                        del self._open[output.request_id]
                        self._idle_since = asyncio.get_running_loop().time()
                    generation.deliver(output)

    def _control_done(self, message: ControlDone) -> None:
        done, settle = self._controls.pop(message.id)
        settle(message.id, message.error)
        if message.error is None:
            done.set_result(None)
        else:
            done.set_exception(ControlRefused(message.error))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Tell everyone when the process ends."""
        code = await process.wait()
        if code > 0:
            # It exited by itself, so it sent its reason before: let that arrive.
            await asyncio.wait([self._dead], timeout=_LAST_WORDS_TIMEOUT_S)
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        self._die(f"The engine process {how}.")

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of this class: without this task nothing would ever answer, so end it all. close() raises it.
            self._die(f"The engine's client failed: {error!r}")
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    def _die(self, reason: str) -> None:
        """Fail everything that is open; the first reason stands."""
        if self._dead.done():
            return
        self._dead.set_result(reason)
        for generation in self._open.values():
            generation.fail(self._end())
        self._open.clear()
        for done, _ in self._controls.values():
            done.set_exception(self._end())
        self._controls.clear()

    def _end(self) -> EngineDead:
        return (EngineStopped if self._stopped else EngineDead)(self._dead.result())

    def _abort(self, generation: Generation) -> None:
        """Ask the engine to end a request. It stays open until the engine's answer, and counts as long."""
        # Its id may name another request by now, if it ended before anybody read that.
        if self._open.get(generation.request_id) is generation and not self._dead.done():
            self._sender.send(encoder.encode(AbortRequests([generation.request_id])), zmq.NOBLOCK)


def _make_directory() -> str:
    """A folder for one instance's sockets, mode 0700, where their paths are short enough for the system.

    That is the folder for temporary files, or ``/tmp`` if it lies too deep. Raises EngineDead if there is neither.
    """
    random_part, longest_name = 8, max(len(INPUT_SOCKET), len(OUTPUT_SOCKET))
    try:
        parent = tempfile.gettempdir()
        if len(os.fsencode(f"{parent}/{_DIRECTORY_PREFIX}/")) + random_part + longest_name > _LONGEST_SOCKET_PATH:
            parent = "/tmp"
        return tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=parent)
    except OSError as fault:
        raise EngineDead(f"There is no place for the engine's sockets: {fault}. Set TMPDIR to a folder.") from fault
