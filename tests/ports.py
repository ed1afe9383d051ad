"""Ports for the tests' servers, each handed out once for a long while, also beside other test runs on the machine.

They lie below those that the kernel gives to whoever asks for any port (from 32768 on, unless configured otherwise),
so that a port stays free until the server it is meant for binds it, and while that server is down.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

_FIRST, _COUNT = 20_000, 10_000
_LAST_TAKEN = Path(tempfile.gettempdir()) / f"penstock-tests-{os.getuid()}.port"


def free_port() -> int:
    """A port on loopback that nobody listens on, and that no other test is given."""
    descriptor = os.open(_LAST_TAKEN, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        last = int(text) if text.isdecimal() else 0
        for step in range(1, _COUNT + 1):
            port = _FIRST + (last + step) % _COUNT
            if _can_be_bound(port):
                file.seek(0)
                file.write(f"{port - _FIRST:05}")
                return port
    raise OSError(f"no port from {_FIRST} to {_FIRST + _COUNT - 1} is free")


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
