from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli import cli

Penstock = Callable[..., Result]


def ok(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(result: Result, *words: str) -> None:
    assert result.exit_code != 0
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    for word in words:
        assert word in result.stderr


@pytest.fixture
def penstock(
    database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Result]:
    """``penstock("tenant", "list")`` runs a command against this test's services."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PENSTOCK_SECRET_KEY", "secret-key-of-the-tests-of-this-command")
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, list(arguments))
        assert "Traceback" not in result.output
        return result

    return run
