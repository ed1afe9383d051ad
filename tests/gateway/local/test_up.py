"""``penstock up`` as a process: what it refuses, says and leaves behind. tests/e2e asks the running whole."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psycopg
import pytest

from gateway.local.files import Credentials, DataDir
from gateway.local.up import LocalPenstock, UpOptions
from gateway.redis_url import client
from gateway.routing.registry import Registry, worker_key
from tests.ports import free_port
from worker.protocol.fleet import WorkerRecord

PENSTOCK = Path(sys.executable).with_name("penstock")
MARK = "PENSTOCK_TEST_MARK"


class Up:
    """``penstock up`` runs in a folder. All processes that come of one object bear its mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.output = folder / "up.log"
        self.mark = uuid.uuid4().hex
        hidden = ("DATABASE_URL", "REDIS_URL", "PENSTOCK_", "OPENAI_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.environment = inherited | {MARK: self.mark}
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.output.open("wb") as output:
            process = subprocess.Popen(
                [PENSTOCK, "up", "--port", str(self.port), *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def refused(self, *arguments: str) -> str:
        """What it says when it ends by itself; it must end with status 1 and leave nothing running."""
        process = self.start(*arguments)
        assert process.wait(60) == 1, self.said
        self.await_gone()
        return self.said

    def await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 120
        while "Penstock is ready" not in self.said:
            assert process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    @property
    def said(self) -> str:
        return self.output.read_text()

    def processes(self) -> dict[int, str]:
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def await_gone(self, limit_s: float = 10.0) -> None:
        deadline = time.monotonic() + limit_s
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    for pid in up.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in up.started:
        process.wait()


def test_a_port_in_use_is_named_with_the_way_to_another(up: Up) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up.port = taken.getsockname()[1]
        said = up.refused()
    assert f"Port {up.port} on 127.0.0.1 is in use" in said
    assert f"make up PORT={up.port + 1}" in said
    assert not (up.folder / ".penstock" / "postgres").exists(), "it looked before it began"


def test_a_second_one_says_so_and_harms_nothing(up: Up) -> None:
    first = DataDir(up.folder / ".penstock")
    first.lock.acquire("process 1, http://127.0.0.1:9")
    first.write_settings({"port": 9}, {})
    before = first.settings.read_bytes()
    try:
        assert "already runs from this folder: process 1, http://127.0.0.1:9" in up.refused()
    finally:
        first.lock.release()
    assert first.settings.read_bytes() == before


def test_an_address_that_is_not_this_machines_is_refused(up: Up) -> None:
    assert "cannot listen on 192.0.2.1" in up.refused("--host", "192.0.2.1")


def test_a_database_that_is_away_is_named_and_what_was_started_is_stopped(up: Up, redis_url: str) -> None:
    up.environment |= {"DATABASE_URL": f"postgresql://u:secret-word@127.0.0.1:{free_port()}/p", "REDIS_URL": redis_url}
    said = up.refused()
    assert "the database cannot be used" in said
    assert "secret-word" not in said


@pytest.mark.parametrize("scheme", ["redis", "http"])
def test_a_redis_that_is_away_or_no_redis_is_named_before_anything_is_kept(
    up: Up, empty_database_url: str, scheme: str
) -> None:
    url = f"{scheme}://:secret-word@127.0.0.1:{free_port()}/0"
    up.environment |= {"DATABASE_URL": empty_database_url, "REDIS_URL": url}
    said = up.refused()
    assert ("the Redis cannot be used" if scheme == "redis" else "REDIS_URL is no Redis URL") in said
    assert "secret-word" not in said
    assert not (up.folder / ".penstock" / "env").exists()
    with psycopg.connect(empty_database_url) as connection:
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert tables == (0,), "nothing was migrated"


def test_the_usage_command_of_the_banner_names_data_that_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, prefix in ((".penstock", ""), ("else where", "PENSTOCK_CONFIG='else where/settings.toml' ")):
        said: list[str] = []
        local = LocalPenstock(UpOptions(Path(folder), "127.0.0.1", 8080, None, None), said.append)
        local._banner(Credentials("key", "admin-key"))
        assert f"  Usage     {prefix}{PENSTOCK} usage --tenant demo\n" in said[0]


def test_a_child_that_fails_at_the_start_shows_the_end_of_its_log(
    up: Up, empty_database_url: str, redis_url: str
) -> None:
    up.environment |= {"DATABASE_URL": empty_database_url, "REDIS_URL": redis_url, "PENSTOCK_LEASE_S": "0.1"}
    said = up.refused()
    assert "gateway ended with status 2 while starting" in said
    assert "lease_s must be at least twice lease_renewal_s" in said
    assert "gateway.log" in said


async def _register(redis_url: str, record: WorkerRecord) -> None:
    async with Registry(redis_url, ttl_s=60, timeout_s=2) as registry:
        await registry.register(record)


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_from_an_empty_folder_through_a_kill_to_a_good_end(up: Up, empty_database_url: str, redis_url: str) -> None:
    """With servers of its user's own: the embedded ones are in tests/e2e and test_services.py."""
    up.environment |= {"DATABASE_URL": empty_database_url, "REDIS_URL": redis_url}
    process = up.start()
    up.await_ready(process)
    data = up.folder / ".penstock"
    assert not (data / "postgres").exists()
    assert not (data / "redis").exists()
    for name in ("env", "settings.toml"):
        assert stat.S_IMODE((data / name).stat().st_mode) == 0o600
    # The line that is printed works when pasted; here it is read as a shell reads it.
    pasted = re.search(r"^  curl .*?\}'$", up.said, re.MULTILINE | re.DOTALL)
    assert pasted
    words = shlex.split(pasted[0].replace("\\\n", " "))
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    answer = httpx.post(words[2], headers=headers, content=words[words.index("-d") + 1], timeout=60)
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]")
    for path in ("docs", "healthz", "readyz"):
        url = f"http://127.0.0.1:{up.port}/{path}"
        assert url in up.said
        assert httpx.get(url, timeout=10).status_code == 200
    first = DataDir(data).credentials()
    with client(redis_url) as connected:
        (record,) = connected.keys(worker_key("local-*"))
        told = connected.get(record)

    process.kill()
    process.wait()
    up.await_gone()

    # As if the worker could not have withdrawn, and its record not run out yet: nobody is there.
    asyncio.run(_register(redis_url, msgspec.json.decode(told, type=WorkerRecord)))
    process = up.start()
    up.await_ready(process)
    answer = httpx.post(words[2], headers=headers, content=words[words.index("-d") + 1], timeout=60)
    assert answer.status_code == 200, "ready means that the new worker is there"
    assert DataDir(data).credentials() == first, "the keys stay"
    begin = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: to the whole group of the foreground
    assert process.wait(15) == 0, up.said
    up.await_gone(limit_s=max(0.0, begin + 10.0 - time.monotonic()))
