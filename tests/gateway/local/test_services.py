import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from gateway.local import services
from gateway.local.services import (
    EmbeddedPostgres,
    EmbeddedRedis,
    ServiceError,
    free_port,
    log_tail,
    spawn,
    write_secret,
)

CHILD = Path(services.__file__).with_name("child.py")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


def test_postgres_keeps_data_over_stop_and_crash(services_dir: Path) -> None:
    service = EmbeddedPostgres(services_dir, durable=False)
    try:
        url = service.start()
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept (value text)")
            connection.execute("INSERT INTO kept VALUES ('été')")
            assert connection.execute("SHOW timezone").fetchone() == ("UTC",)
            assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)
        service.stop()
        assert service.start() == url, "the port stays"
        service.kill()
        service.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT value FROM kept").fetchone() == ("été",)
    finally:
        service.stop()


def test_postgres_asks_for_the_password(postgres_server: str) -> None:
    wrong = psycopg.conninfo.make_conninfo(postgres_server, password="wrong")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(wrong)


def test_postgres_clears_a_pid_file_that_names_a_stranger(services_dir: Path) -> None:
    service = EmbeddedPostgres(services_dir, durable=False)
    try:
        service.start()
        service.stop()
        (services_dir / "data" / "postmaster.pid").write_text(f"{os.getpid()}\n{services_dir / 'data'}\n")
        service.start()
        assert service.running()
    finally:
        service.stop()


def test_an_interrupted_initdb_is_done_anew(services_dir: Path) -> None:
    (services_dir / "data.unfinished").mkdir(parents=True)
    (services_dir / "data.unfinished" / "PG_VERSION").write_text("18\n")
    service = EmbeddedPostgres(services_dir, durable=False)
    try:
        with psycopg.connect(service.start()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        service.stop()


def test_redis_keeps_data_over_stop(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir)
    try:
        with redis.Redis.from_url(service.start()) as client:
            client.set("kept", "1")
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
        service.stop()
        with redis.Redis.from_url(service.start()) as client:
            assert client.get("kept") == b"1"
    finally:
        service.stop()


def test_redis_has_search_and_asks_for_the_password(redis_server: str) -> None:
    with redis.Redis.from_url(redis_server) as client:
        assert isinstance(client.execute_command("FT._LIST"), list | set)
    with (
        redis.Redis(host="127.0.0.1", port=int(redis_server.rsplit(":", 1)[1].split("/")[0])) as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_a_port_taken_meanwhile_is_replaced(services_dir: Path, redis_server: str) -> None:
    service = EmbeddedRedis(services_dir, durable=False)
    taken = int(redis_server.rsplit(":", 1)[1].split("/")[0])
    service._port = taken
    try:
        with redis.Redis.from_url(service.start()) as client:
            assert client.ping()
        assert service.port != taken
    finally:
        service.stop()


def test_a_failed_start_shows_the_log(services_dir: Path) -> None:
    service = EmbeddedRedis(services_dir, password='"\nno-such-directive 1\n"')
    with pytest.raises(ServiceError, match=r"(?s)redis\.log.*FATAL CONFIG FILE"):
        service.start()
    assert not service.running()


@pytest.mark.parametrize("name", ["EmbeddedPostgres", "EmbeddedRedis"])
def test_nothing_outlives_a_killed_parent(services_dir: Path, name: str) -> None:
    program = f"""
import pathlib, sys, time
from gateway.local.services import {name}
service = {name}(pathlib.Path({str(services_dir)!r}), durable=False)
service.start()
print(service.process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
    wait_gone(pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up being root")
@pytest.mark.parametrize(("user", "uid"), [("same", "0"), ("unprivileged", None), ("nobody", "65534")])
def test_root_becomes_an_ordinary_user_who_still_reaches_roots_files(
    tmp_path: Path, user: str, uid: str | None
) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    write_secret(private / "secret", "word")
    script = f"id -u; cat {private / 'secret'}; : > {private / 'written'}"
    command = [sys.executable, "-I", "-S", CHILD, "9", str(os.getpid()), user, "/bin/sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found, word = done.stdout.split()
    assert word == "word"
    assert found == uid if uid else found != "0"
    assert (private / "written").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up being root")
def test_postgres_runs_where_user_namespaces_are_forbidden(services_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn_as_nobody(command: list[str], *, unprivileged: bool, **rest: Any) -> subprocess.Popen[bytes]:
        assert unprivileged
        shim = [sys.executable, "-I", "-S", str(CHILD), str(int(signal.SIGKILL)), str(os.getpid()), "nobody"]
        return spawn([*shim, *command], **rest)

    monkeypatch.setattr(services, "spawn", spawn_as_nobody)
    service = EmbeddedPostgres(services_dir, durable=False)
    try:
        with psycopg.connect(service.start()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert (services_dir / "data").stat().st_uid == 65534
        service.stop()
        service.start()
    finally:
        service.stop()


def test_secrets_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_secret(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_log_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_tail(path) == ""
    path.write_text("".join(f"line {i}\n" for i in range(50)))
    assert log_tail(path, 2) == "line 48\nline 49"


def test_free_ports_can_be_bound() -> None:
    assert 1024 <= free_port() <= 65535
