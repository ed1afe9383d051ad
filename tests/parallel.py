"""How ``pytest -n`` spreads the suite over processes: a file's tests stay together, and so do those that share more.

Each process has a Postgres and a Redis of its own (``tests/conftest.py``), so that no test knows of the others.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

CORES = frozenset(os.sched_getaffinity(0))
"""What this process may use, as it was before torch was loaded."""

_TOGETHER = ("tests/e2e/money/", "tests/e2e/")
"""Folders whose tests share processes that are slow to start."""


class Sharing(LoadScopeScheduling):  # type: ignore[misc]
    """Gives out work in the order of collection, which has the longest first: what ends the run should be short."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in _TOGETHER if nodeid.startswith(folder)), nodeid.split("::", 1)[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    config.option.loadscopereorder = False
    return Sharing(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For ``-n auto``: a process a core; one process, this one, for named files and for servers that were given."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    shared = os.environ.get("TEST_REDIS_URL", "cluster") != "cluster"
    return 0 if named or shared else len(CORES)
