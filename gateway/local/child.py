"""Run as a program by path: ties itself to its parent's life, drops what the real program must not have, and execs it.

``python -I -S child.py SIGNAL PARENT_PID USER PROGRAM [ARGUMENT...]``

SIGNAL is what the kernel sends when the thread that started this process ends, however it ends. USER is ``same``, or
``unprivileged`` for programs that refuse root (Postgres): then root becomes an ordinary user, inside a user namespace
of its own where the machine allows that (no account is made, no file changes its owner), else (in most containers)
user 65534 who may still read and write what root may. ``nobody`` asks for the latter at once.

It imports nothing of this distribution, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGINT = 2
_SIG_DFL = None
_CLONE_NEWUSER = 0x10000000
_UNPRIVILEGED_ID = 1000
_NOBODY = 65534
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1


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


def become_nobody() -> None:
    """Become user 65534 and keep one right of root's: to pass file permissions, since the programs and data may lie
    below a folder that is root's alone. Raises OSError."""
    libc = _libc()
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    mask = 1 << _CAP_DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable rights 0 to 31, then the same for 32 to 63.
    rights = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    if libc.capset(header, rights) != 0 or libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"capset: {os.strerror(code)}")


def drop_root(user: str) -> None:
    """Become an ordinary user as USER says. Raises OSError."""
    if user == "unprivileged":
        try:
            enter_user_namespace()
        except OSError:
            become_nobody()
    elif user == "nobody":
        become_nobody()


def main(arguments: list[str]) -> None:
    signal, parent, user, program = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    if os.geteuid() == 0:
        try:
            drop_root(user)
        except OSError as fault:
            sys.exit(
                f"{program[0]} refuses to run as root, and root may not become another user here ({fault}). "
                "Run as an ordinary user, or set DATABASE_URL to a Postgres of your own."
            )
    libc = _libc()
    # Ignored where a shell started us in the background, and then no shell among the children could trap it.
    libc.signal(_SIGINT, _SIG_DFL)
    libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent ended before its child began")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
