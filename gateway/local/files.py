"""What ``penstock up`` keeps under its data folder, ``.penstock``: a lock, settings and credentials."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.local.services import write_secret


class AlreadyRunning(Exception):
    """Another ``penstock up`` holds the folder."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"Penstock already runs from this folder: {holder}")


class Lock:
    """The right to run from a data folder; the kernel gives it back when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, holder: str) -> bool:
        """Take the lock and name its holder in the file. True if the holder before ended without ``release``.

        Raises AlreadyRunning.
        """
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 4096, 0).decode(errors="replace")
            os.close(descriptor)
            raise AlreadyRunning(text.strip() or "another process is starting it") from None
        crashed = os.fstat(descriptor).st_size > 0
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        self._descriptor = descriptor
        return crashed

    def release(self) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys of the local set-up. The database holds only their hashes, so this file is the one place that has them."""

    tenant_key: str
    admin_key: str


class DataDir:
    """The data folder and the files in it. Made, readable by its owner alone, if missing."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.logs = self.path / "logs"
        self.logs.mkdir(exist_ok=True)
        self.lock = Lock(self.path / "lock")
        self.settings = self.path / "settings.toml"
        self.environment = self.path / "env"

    def renew_logs(self) -> None:
        """Begin all logs anew, so that they do not grow for ever; those of the last run stay beside as ``.log.1``."""
        for log in self.logs.glob("*.log"):
            log.replace(log.with_name(log.name + ".1"))

    def fleet_token(self) -> str:
        """The token of the last start, so that workers started by hand find their gateway again; else a new one."""
        kept = self._kept_settings().get("fleet_token")
        return kept if isinstance(kept, str) and len(kept) >= 16 else secrets.token_hex(32)

    def secret_key(self) -> str:
        """The deployment's secret key, made at the first start."""
        kept = self._kept_settings().get("secret_key")
        return kept if isinstance(kept, str) and len(kept) >= 32 else secrets.token_hex(32)

    def write_settings(self, values: dict[str, str | int], defaults: dict[str, str | int | float | bool]) -> None:
        """Set ``values``; keep what the file said before about everything else, with ``defaults`` for what it lacks."""
        merged: dict[str, Any] = {**defaults, **self._kept_settings(), **values}
        lines = ["# Written by `penstock up`. Environment variables override it; it overrides the defaults."]
        # Of all that is written here, JSON's spelling is TOML's too.
        lines += [f"{key} = {json.dumps(value)}" for key, value in sorted(merged.items())]
        write_secret(self.settings, "\n".join(lines) + "\n")

    def _kept_settings(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self.settings.read_text())
        except FileNotFoundError:
            return {}

    def credentials(self) -> Credentials | None:
        """The keys of the last start; None if there are none."""
        try:
            words = shlex.split(self.environment.read_text(), comments=True)
        except FileNotFoundError:
            return None
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        tenant_key, admin_key = variables.get("OPENAI_API_KEY"), variables.get("PENSTOCK_ADMIN_KEY")
        return Credentials(tenant_key, admin_key) if tenant_key and admin_key else None

    def write_environment(self, base_url: str, credentials: Credentials) -> None:
        """Write the file that a shell sources to talk to this Penstock."""
        exports = {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": credentials.tenant_key,
            "PENSTOCK_ADMIN_KEY": credentials.admin_key,
        }
        write_secret(self.environment, "".join(f"export {k}={shlex.quote(v)}\n" for k, v in exports.items()))
