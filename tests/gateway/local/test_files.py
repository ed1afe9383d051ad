import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.local.files import AlreadyRunning, Credentials, DataDir, Lock
from gateway.settings import load_settings


def test_one_holder_at_a_time_and_it_is_named(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert first.acquire("process 1, http://127.0.0.1:8080") is False
    with pytest.raises(AlreadyRunning, match="already runs from this folder: process 1, http"):
        second.acquire("process 2")
    first.release()
    assert second.acquire("process 2") is False
    second.release()


def test_a_killed_holder_is_noticed(tmp_path: Path) -> None:
    program = f"""
import os, pathlib
from gateway.local.files import Lock
Lock(pathlib.Path({str(tmp_path)!r}) / "lock").acquire("process 1")
os.kill(os.getpid(), 9)
"""
    assert subprocess.call([sys.executable, "-c", program]) == -9
    lock = Lock(tmp_path / "lock")
    assert lock.acquire("process 2") is True
    lock.release()


def test_settings_are_read_back_as_written(tmp_path: Path) -> None:
    folder = DataDir(tmp_path / "data")
    values: dict[str, str | int] = {
        "database_url": 'postgresql://u:p"\\@h/é',
        "redis_url": "redis://h",
        "port": 8081,
        "fleet_token": folder.fleet_token(),
    }
    folder.write_settings(values, {"drain_s": 4.0, "ready_needs_backend": True})
    settings = load_settings({"PENSTOCK_CONFIG": str(folder.settings)})
    assert settings.database_url == values["database_url"]
    assert (settings.port, settings.drain_s, settings.ready_needs_backend) == (8081, 4.0, True)
    assert stat.S_IMODE(folder.settings.stat().st_mode) == 0o600


def test_what_its_user_changed_in_the_settings_is_kept(tmp_path: Path) -> None:
    folder = DataDir(tmp_path)
    values: dict[str, str | int] = {"database_url": "postgresql://a", "redis_url": "redis://a", "port": 1}
    folder.write_settings(values, {"drain_s": 4.0})
    text = folder.settings.read_text()
    folder.settings.write_text(text.replace("drain_s = 4.0", "drain_s = 9.0") + "lease_s = 20\n")
    folder.write_settings({**values, "port": 2}, {"drain_s": 4.0})
    settings = load_settings({"PENSTOCK_CONFIG": str(folder.settings)})
    assert (settings.port, settings.drain_s, settings.lease_s) == (2, 9.0, 20.0)


def test_the_fleet_token_outlives_a_restart(tmp_path: Path) -> None:
    token = DataDir(tmp_path).fleet_token()
    assert len(token) >= 32
    DataDir(tmp_path).write_settings({"fleet_token": token}, {})
    assert DataDir(tmp_path).fleet_token() == token
    assert DataDir(tmp_path / "other").fleet_token() != token


def test_a_shell_reads_the_exports(tmp_path: Path) -> None:
    folder = DataDir(tmp_path)
    assert folder.credentials() is None
    folder.write_environment("http://127.0.0.1:8080", Credentials("sk-tenant", "sk-admin"))
    assert stat.S_IMODE(folder.environment.stat().st_mode) == 0o600
    assert folder.credentials() == Credentials("sk-tenant", "sk-admin")
    script = f'. {folder.environment}; echo "$OPENAI_BASE_URL $OPENAI_API_KEY $PENSTOCK_ADMIN_KEY"'
    out = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out == "http://127.0.0.1:8080/v1 sk-tenant sk-admin\n"


def test_a_damaged_environment_file_counts_as_none(tmp_path: Path) -> None:
    folder = DataDir(tmp_path)
    folder.environment.write_text("export OPENAI_API_KEY=sk-tenant\n")
    assert folder.credentials() is None


def test_the_folder_is_closed_to_others(tmp_path: Path) -> None:
    folder = DataDir(tmp_path / "new")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_logs_begin_anew_and_the_last_ones_stay(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    log, last = data.logs / "gateway.log", data.logs / "gateway.log.1"
    for run in ("first", "second"):
        log.write_text(run)
        data.renew_logs()
        assert not log.exists()
        assert last.read_text() == run
    data.renew_logs()
    assert last.read_text() == "second", "there was nothing newer"
