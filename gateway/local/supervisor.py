"""Keeps a set of child processes running, and stops them in order.

Everything happens in the thread that calls ``watch``; signals reach it as the exception StopRequested.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_POLL_S = 0.1
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_STEADY_S = 30.0
"""A child that ran for so long before it died is restarted as if it had never died before."""


class StopRequested(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception, so that nobody handles it by mistake."""


class ChildFailed(Exception):
    """A child ended before it was ready."""

    def __init__(self, child: Child, status: int) -> None:
        super().__init__(f"{child.name} ended with {describe_status(status)} while starting")
        self.child = child


@dataclass(eq=False)
class Child:
    """One supervised process: how to launch it and how to stop it."""

    name: str
    launch: Callable[[], subprocess.Popen[bytes]]
    log: Path
    stop_signal: signal.Signals = signal.SIGTERM
    stop_limit_s: float = 2.0
    """How long it may take to stop before it is killed, with everything it started."""
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    _launched_at: float = 0.0
    _restart_at: float | None = None
    _pause_s: float = _FIRST_PAUSE_S

    def start(self) -> None:
        self.run_as(self.launch())

    def run_as(self, process: subprocess.Popen[bytes]) -> None:
        """Take ``process`` for this child's."""
        self.process = process
        self._launched_at, self._restart_at = time.monotonic(), None

    def ended(self) -> int | None:
        """The exit status if the process has ended (its whole group is gone then), else None."""
        process = self.process
        if process is None:
            return None
        # Seen ended but not yet reaped, its pid cannot belong to another: only then is it safe to kill its group.
        if process.returncode is None:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            _kill_group(process.pid)
        return process.wait()

    def schedule_restart(self, now: float) -> float:
        """After an end: plan the restart and return the seconds until then. The pause doubles with each early death."""
        if now - self._launched_at >= _STEADY_S:
            self._pause_s = _FIRST_PAUSE_S
        pause, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S)
        self.process, self._restart_at = None, now + pause
        return pause

    def restart_due(self, now: float) -> bool:
        return self._restart_at is not None and now >= self._restart_at


class Supervisor:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._children: list[Child] = []
        self._stopping = False
        self._hurry = False
        self._launching = False

    def start(self, child: Child) -> None:
        """Launch a child and watch over it."""
        with self._undisturbed():
            child.start()
            self._children.append(child)

    def adopt(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        """Watch over a child that runs already, as ``process``."""
        child.run_as(process)
        self._children.append(child)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        # A signal between the launch of a process and the note of its id would leave it running: it waits until then.
        self._launching = True
        try:
            yield
        finally:
            self._launching = False
        if self._stopping:
            raise StopRequested

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Within: the first SIGINT, SIGTERM or SIGHUP raises StopRequested, a later one makes ``stop`` hurry."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._stopping:
                self._hurry = True
                return
            self._stopping = True
            if not self._launching:
                raise StopRequested

        watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [(number, signal.signal(number, handle)) for number in watched]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def check_starting(self) -> None:
        """Raises ChildFailed if some child has ended; to be called while the whole is not yet ready."""
        for child in self._children:
            status = child.ended()
            if status is not None:
                raise ChildFailed(child, status)

    def watch(self) -> None:
        """Restart whatever dies, until StopRequested."""
        while True:
            for child in self._children:
                self._tend(child)
            time.sleep(_POLL_S)

    def _tend(self, child: Child) -> None:
        now = time.monotonic()
        status = child.ended()
        if status is not None:
            pause = child.schedule_restart(now)
            self._say(
                f"{child.name} ended with {describe_status(status)}; restarting in {pause:g} s (log: {child.log})"
            )
        elif child.restart_due(now):
            try:
                with self._undisturbed():
                    child.start()
                    child.restarts += 1
            except Exception as fault:
                pause = child.schedule_restart(now)
                self._say(f"{child.name} could not be restarted: {fault}; next try in {pause:g} s")
            else:
                self._say(f"{child.name} restarted")

    def stop(self, groups: Sequence[Sequence[Child]], *, within_s: float = 9.0) -> None:
        """Stop the children, one group after the other; those of a group together. Nothing outlives this call.

        ``within_s``: the limit for all of them, whatever their own limits are.
        """
        self._stopping = True
        deadline = time.monotonic() + within_s
        for group in groups:
            self._stop_group([child for child in group if child.process is not None], deadline)

    def _stop_group(self, group: Sequence[Child], deadline: float) -> None:
        begin = time.monotonic()
        for child in group:
            assert child.process is not None
            if child.ended() is None:
                child.process.send_signal(child.stop_signal)
        waiting = list(group)
        while waiting:
            for child in list(waiting):
                assert child.process is not None
                if child.ended() is None:
                    limit = 0.3 if self._hurry else child.stop_limit_s
                    if time.monotonic() < min(begin + limit, deadline):
                        continue
                    self._say(f"{child.name} did not stop in {time.monotonic() - begin:.1f} s; killing it")
                    _kill_group(child.process.pid)
                    child.process.wait()
                child.process = None
                waiting.remove(child)
            time.sleep(0.02)


def describe_status(status: int) -> str:
    """An exit status as ``subprocess`` gives it, in words."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _kill_group(leader: int) -> None:
    # Children are started in sessions of their own, so the group holds the child and what it started, nothing else.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
