from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import parallel
from tests.ports import free_port

ArgsSource = pytest.Config.ArgsSource


def test_torch_binds_no_test_and_no_server_to_one_core() -> None:
    import torch

    assert torch.ones(512, 512).matmul(torch.ones(512, 512))[0, 0] == 512
    assert os.sched_getaffinity(0) == parallel.CORES


def test_ports_are_handed_out_once_and_never_by_the_kernel() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < max(lowest, 30_000)


@pytest.mark.parametrize(
    ("args_source", "redis", "workers"),
    [
        (ArgsSource.TESTPATHS, None, len(parallel.CORES)),
        (ArgsSource.TESTPATHS, "cluster", len(parallel.CORES)),
        (ArgsSource.TESTPATHS, "redis://127.0.0.1:6379/0", 0),
        (ArgsSource.ARGS, None, 0),
    ],
)
def test_processes_for_the_whole_suite_and_none_for_named_files(
    monkeypatch: pytest.MonkeyPatch, args_source: Any, redis: str | None, workers: int
) -> None:
    if redis is None:
        monkeypatch.delenv("TEST_REDIS_URL", raising=False)
    else:
        monkeypatch.setenv("TEST_REDIS_URL", redis)
    config: Any = SimpleNamespace(args_source=args_source)
    assert parallel.pytest_xdist_auto_num_workers(config) == workers
