from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import device
from kernels.device import cgroup_memory, free_memory

GIB = 2**30


def group(folder: Path, limit: str, used: int, inactive: int, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\nactive_file 7\n")


def member(folder: Path, text: str) -> Path:
    path = folder / "membership"
    path.write_text(text)
    return path


def test_every_group_above_a_process_limits_it(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "a", str(4 * GIB), 3 * GIB, GIB // 2)
    group(root / "a/b", "max", GIB, 0)
    group(root / "a/b/c", str(2 * GIB), 3 * GIB, 0)
    group(root / "other", str(1), 0, 0)
    assert cgroup_memory(member(tmp_path, "0::/a/b/c\n"), root) == [0, GIB + GIB // 2]
    assert cgroup_memory(member(tmp_path, "0::/a/b\n"), root) == [GIB + GIB // 2]
    assert cgroup_memory(member(tmp_path, "0::/\n"), root) == []


def test_the_first_version_is_known_and_a_path_of_the_hosts_means_the_top(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "memory", str(3 * GIB), GIB, 0, version=1)
    lines = "12:cpu,cpuacct:/x\n5:memory:/docker/0123\n1:name=systemd:/y\n0::/z\n"
    assert cgroup_memory(member(tmp_path, lines), root) == [2 * GIB]


def test_nothing_is_limited_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path / "none", tmp_path) == []
    group(tmp_path / "cgroup", "nonsense", 1, 1)
    assert cgroup_memory(member(tmp_path, "0::/\n"), tmp_path / "cgroup") == []


def test_free_memory_is_what_machine_and_groups_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(device, "cgroup_memory", lambda *_: [])
    machine = free_memory(cpu)
    assert machine > 2**20
    monkeypatch.setattr(device, "cgroup_memory", lambda *_: [12345, 2**60])
    assert free_memory(cpu) == 12345
