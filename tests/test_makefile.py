"""The README's commands, as make would run them, and what continuous integration runs."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make(*arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    listed = re.findall(r"^  ([a-z-]+) +\S", make("help"), re.MULTILINE)
    assert sorted(listed) == sorted(phony[1].split())
    assert make() == make("help")


def test_up_becomes_penstock_so_that_signals_reach_it() -> None:
    last = make("-n", "up", "PORT=8123", "HOST=127.0.0.2").splitlines()[-1]
    assert last == "exec .venv/bin/penstock up --host 127.0.0.2 --port 8123"


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"
    assert re.search(r"^make test$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert make("-n", "test", "ARGS=-x").splitlines()[-1] == "exec .venv/bin/pytest -n auto -x"
