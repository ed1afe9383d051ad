import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.local.services import spawn
from gateway.local.supervisor import Child, ChildFailed, StopRequested, Supervisor, describe_status


def shell(tmp_path: Path, script: str, **fields: object) -> Child:
    log = tmp_path / "child.log"

    def launch() -> subprocess.Popen[bytes]:
        return spawn(["/bin/sh", "-c", script], log=log, death_signal=signal.SIGKILL)

    return Child("child", launch, log, **fields)  # type: ignore[arg-type]


def eventually(check: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


def watch_until(supervisor: Supervisor, check: Callable[[], bool]) -> None:
    """Run ``watch`` in this thread until ``check`` holds, then stop it as a user would: by a signal."""

    def interrupt() -> None:
        eventually(check)
        os.kill(os.getpid(), signal.SIGTERM)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with supervisor.signals(), pytest.raises(StopRequested):
        supervisor.watch()
    helper.join()


def test_restarts_what_dies_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    child = shell(tmp_path, "echo run; sleep 600")
    supervisor.start(child)
    assert child.process is not None
    first = child.process.pid
    os.kill(first, signal.SIGKILL)
    watch_until(supervisor, lambda: child.restarts == 1)
    assert child.process is not None
    assert child.process.pid != first
    assert any("signal SIGKILL" in line and "restarting" in line for line in said)
    supervisor.stop([[child]])
    assert child.process is None


def test_the_pause_before_a_restart_doubles_up_to_a_limit_and_falls_back(tmp_path: Path) -> None:
    child = shell(tmp_path, "exit 1")
    child.start()
    eventually(lambda: child.ended() is not None)
    now = time.monotonic()
    pauses = [child.schedule_restart(now) for _ in range(7)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert not child.restart_due(now + 9.9)
    assert child.restart_due(now + 10.0)
    assert child.schedule_restart(now + 60.0) == 0.5


def test_a_failed_launch_is_tried_again(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    attempts = 0

    def launch() -> subprocess.Popen[bytes]:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            raise OSError("no more processes")
        return spawn(["/bin/sleep", "600"], log=tmp_path / "log", death_signal=signal.SIGKILL)

    child = Child("child", launch, tmp_path / "log")
    supervisor.start(child)
    assert child.process is not None
    child.process.kill()
    watch_until(supervisor, lambda: attempts == 3)
    assert any("no more processes" in line for line in said)
    supervisor.stop([[child]])


def test_what_a_dead_child_left_in_its_group_is_killed(tmp_path: Path) -> None:
    child = shell(tmp_path, "sleep 600 & echo started; exit 3")
    child.start()
    assert child.process is not None
    leader = child.process.pid
    eventually(lambda: child.ended() is not None)
    assert child.ended() == 3
    eventually(lambda: group_is_gone(leader))


def test_a_child_that_ends_while_starting_is_an_error(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    child = shell(tmp_path, "echo bad setting; exit 2")
    supervisor.start(child)
    eventually(lambda: child.ended() is not None)
    with pytest.raises(ChildFailed, match="child ended with status 2 while starting"):
        supervisor.check_starting()
    assert child.log.read_text() == "bad setting\n"


def test_stops_groups_in_order_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    order = tmp_path / "order"
    polite = shell(tmp_path, f"trap 'echo polite >> {order}; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    deaf = shell(tmp_path, f"trap 'echo deaf >> {order}' TERM; echo up; sleep 600 & while :; do sleep 0.05; done")
    last = shell(tmp_path, f"trap 'echo last >> {order}; exit 0' INT; echo up; while :; do sleep 0.05; done")
    deaf.stop_limit_s = 0.5
    last.stop_signal = signal.SIGINT
    leaders = []
    for child in (last, deaf, polite):
        supervisor.start(child)
        assert child.process is not None
        leaders.append(child.process.pid)
    eventually(lambda: polite.log.read_text() == "up\n" * 3)
    supervisor.stop([[polite], [deaf], [last]])
    assert order.read_text().split() == ["polite", "deaf", "last"]
    assert any("child did not stop in 0." in line for line in said)
    eventually(lambda: all(group_is_gone(leader) for leader in leaders))


def test_the_limit_for_all_holds_whatever_a_child_asks_for(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(said.append)
    deaf = shell(tmp_path, "trap '' TERM; echo up; while :; do sleep 0.05; done", stop_limit_s=600.0)
    deaf.start()
    eventually(lambda: deaf.log.exists() and "up" in deaf.log.read_text())
    supervisor.stop([[deaf]], within_s=0.3)
    assert deaf.process is None
    assert any("killing it" in line for line in said)


def test_a_second_signal_hurries(tmp_path: Path) -> None:
    supervisor = Supervisor(print)
    deaf = shell(tmp_path, "trap '' TERM; echo up; while :; do sleep 0.05; done", stop_limit_s=600.0)
    supervisor.start(deaf)
    eventually(lambda: deaf.log.exists() and "up" in deaf.log.read_text())
    with supervisor.signals():
        with pytest.raises(StopRequested):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        supervisor.stop([[deaf]])
    assert deaf.process is None


def test_a_signal_during_a_launch_waits_until_the_child_is_known(tmp_path: Path) -> None:
    supervisor = Supervisor(print)

    def launch() -> subprocess.Popen[bytes]:
        process = spawn(["/bin/sleep", "600"], log=tmp_path / "log", death_signal=signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    child = Child("child", launch, tmp_path / "log")
    with supervisor.signals(), pytest.raises(StopRequested):
        supervisor.start(child)
    assert child.process is not None
    supervisor.stop([[child]])


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Supervisor(print).signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("status", "text"), [(0, "status 0"), (-9, "signal SIGKILL"), (-200, "signal 200")])
def test_describe_status(status: int, text: str) -> None:
    assert describe_status(status) == text
