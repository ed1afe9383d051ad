"""Which device computes, in which floating-point type, and how much memory it can give."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch


def select_device(name: str) -> torch.device:
    """``auto`` (a CUDA device if there is one), ``cpu`` or ``cuda[:index]``.

    Raises ``ValueError`` if it isn't there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch finds no CUDA device; use auto or cpu")
    return device


def compute_dtype(device: torch.device) -> torch.dtype:
    """fp32 on CPU, where it is exact and fastest; bf16 elsewhere."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def kv_block_size(device: torch.device) -> int:
    """Tokens in a KV block. On CPU attention reads whole blocks where they lie, without a copy; elsewhere small blocks
    waste less memory."""
    return 128 if device.type == "cpu" else 16


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now: the device's free memory, or the memory that this machine still has available
    and this process's control groups allow."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_machine_memory(), *cgroup_memory(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def release_memory(device: torch.device) -> None:
    """Give back to the system, or to other processes on the device, what freed tensors have left in allocators."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # glibc keeps freed memory between allocations that live on; another C library may lack the call.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _machine_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def cgroup_memory(membership: Path, root: Path) -> list[int]:
    """What each control group of the process (``membership``: its list, as ``/proc/self/cgroup``) with a memory limit
    still allows, in bytes; ``root``: where the groups are mounted.

    Files that are cached but not in use count as free. Reference: Linux, Documentation/admin-guide/cgroup-v2.rst and
    cgroup-v1/memory.rst.
    """
    allowed = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        # A limit holds for all below it. Inside a container the path may be the host's: its top is the group itself.
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (headroom := _headroom(folder, *names)) is not None:
                allowed.append(headroom)
    return allowed


def _headroom(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """What one group still allows; None if it has no limit, or is not there."""
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if most == "max" else max(0, int(most) - used + int(stat.get(reclaimable, 0)))
    except (OSError, ValueError):
        return None
