"""The whole of Penstock as a user has it: `penstock up` in an empty folder, and ways to look at and hurt it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psycopg
import pytest
import redis
from click.testing import CliRunner
from psycopg.rows import dict_row

from gateway.cli import cli
from gateway.local.services import log_tail
from tests.ports import free_port

BIN = Path(sys.executable).parent
MODEL = "smollm2-135m-instruct"
T = TypeVar("T")


def eventually(probe: Callable[[], T], *, limit_s: float = 20.0, what: str = "") -> T:
    """The first true answer of ``probe``; fails when there is none in time."""
    deadline = time.monotonic() + limit_s
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what or probe}; last seen: {found!r}")
        time.sleep(0.05)


def descendants(root: int) -> dict[int, str]:
    """Process ids below ``root``, each with its command line."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = (int(stat[1]), line)
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        parent = todo.pop()
        for pid, (its_parent, line) in parents.items():
            if its_parent == parent and pid not in found:
                found[pid] = line
                todo.append(pid)
    return found


class Stack:
    """One `penstock up`. Start it, stop it, ask it, break it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.output = folder / "up.log"

    # -- life

    def start(self, *, limit_s: float = 120.0) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [BIN / "penstock", "up", "--port", str(self.port)],
                cwd=self.folder,
                env=self.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + limit_s
        while b"OPENAI_API_KEY" not in self.output.read_bytes():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"`penstock up` is not ready:\n{log_tail(self.output, 60)}")
            time.sleep(0.05)
        self.wait_ready()

    def stop(self) -> int:
        """SIGTERM, as `kill` sends it; the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)

    def environment(self) -> dict[str, str]:
        hidden = ("DATABASE_URL", "REDIS_URL", "PENSTOCK_", "OPENAI_", "PORT")
        return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}

    def wait_ready(self, limit_s: float = 40.0) -> None:
        eventually(self.ready, limit_s=limit_s, what="/readyz")

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False

    # -- addresses and secrets

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def exports(self) -> dict[str, str]:
        text = (self.folder / ".penstock/env").read_text()
        return dict(re.findall(r"""^export (\w+)=["']?([^"'\n]*)["']?$""", text, re.MULTILINE))

    @property
    def key(self) -> str:
        return self.exports["OPENAI_API_KEY"]

    @property
    def settings(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / ".penstock/settings.toml").read_text())

    # -- looking

    def cli(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [BIN / "penstock", *arguments],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"penstock {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def operator(self, *arguments: str) -> str:
        """What a command prints, run in this process: a process of its own takes a second to start."""
        with contextlib.chdir(self.folder), pytest.MonkeyPatch.context() as patch:
            for name in os.environ.keys() - self.environment().keys():
                patch.delenv(name)
            done = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
        assert done.exit_code == 0, f"penstock {' '.join(arguments)}: {done.exit_code}\n{done.output}"
        return done.output

    def rows(self, where: str = "true", *parameters: object) -> list[dict[str, Any]]:
        """Rows of the ledger, oldest first."""
        with psycopg.connect(self.settings["database_url"], row_factory=dict_row) as connection:
            query = f"SELECT * FROM usage_events WHERE {where} ORDER BY admitted_at"
            return connection.execute(query, parameters).fetchall()  # type: ignore[arg-type]

    def row(self, request_id: str, *, limit_s: float = 20.0) -> dict[str, Any]:
        """The one row of a request, once the ledger has it."""
        found = eventually(lambda: self.rows("request_id = %s", request_id), limit_s=limit_s, what=f"row {request_id}")
        assert len(found) == 1
        return found[0]

    def open_reservations(self) -> list[str]:
        """Keys of reservations that nobody has settled yet."""
        with redis.Redis.from_url(self.settings["redis_url"], decode_responses=True) as client:
            return [key for key in client.scan_iter("*:request:*") if client.hget(key, "state") == "open"]

    def pids(self, pattern: str) -> list[int]:
        assert self.process is not None
        return [pid for pid, line in descendants(self.process.pid).items() if re.search(pattern, line)]

    def pid(self, pattern: str) -> int:
        """The process whose command line matches; it must be one, shims and parents left out."""
        found = eventually(lambda: self.pids(pattern), what=f"process {pattern}")
        return max(found)

    @property
    def gateway_pid(self) -> int:
        return self.pid(r"penstock serve|gateway\S* serve")

    @property
    def worker_pid(self) -> int:
        return min(eventually(lambda: self.pids(r"penstock-worker"), what="worker"))

    @property
    def engine_pid(self) -> int:
        return self.pid(r"worker\.engine\.process")

    def worker_load(self) -> tuple[int, int]:
        """Requests that the worker runs and queues, as its health page has them."""
        body = httpx.get(f"{self.worker_url}/health", timeout=5).json()
        return int(body["running"]), int(body["waiting"])

    def answers(self) -> bool:
        """Whether a short request is served."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 2}
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0

    def recovered(self) -> bool:
        """Whether all is well: a request is served, and nothing else runs."""
        try:
            return self.ready() and self.answers() and self.worker_load() == (0, 0)
        except httpx.TransportError:
            return False

    @property
    def worker_url(self) -> str:
        with redis.Redis.from_url(self.settings["redis_url"], decode_responses=True) as client:
            for name in client.scan_iter("*worker*"):
                if client.type(name) == "string" and (text := client.get(name)) and "base_url" in str(text):
                    return str(json.loads(str(text))["base_url"])
        raise AssertionError("no worker is registered")

    # -- hurting

    @contextmanager
    def frozen(self, pid: int) -> Iterator[None]:
        """The process hangs: it neither answers nor closes its connections."""
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)
