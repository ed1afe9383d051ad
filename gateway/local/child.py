"""Run as a program by path: ties itself to its parent's life, drops what the real program must not have, and execs it.

``python -I -S child.py SIGNAL PARENT_PID USER PROGRAM [ARGUMENT...]``

SIGNAL is what the kernel sends when the thread that started this process ends, however it ends. USER is ``same``, or
``unprivileged`` for programs that refuse root (Postgres): then root becomes an ordinary user inside a user namespace
of its own, which creates no account and changes no file's owner.

It imports nothing of this distribution, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER = 0x10000000
_UNPRIVILEGED_ID = 1000


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def enter_user_namespace() -> None:
    """Become user 1000 of a new user namespace that maps to the present user. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc().unshare(_CLONE_NEWUSER) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_UNPRIVILEGED_ID} {uid} 1"),
        ("gid_map", f"{_UNPRIVILEGED_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def main(arguments: list[str]) -> None:
    signal, parent, user, program = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    if user == "unprivileged" and os.geteuid() == 0:
        try:
            enter_user_namespace()
        except OSError as fault:
            sys.exit(
                f"{program[0]} refuses to run as root, and this machine forbids user namespaces ({fault}). "
                "Run as an ordinary user, or set DATABASE_URL to a Postgres of your own."
            )
    _libc().prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent ended before its child began")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
