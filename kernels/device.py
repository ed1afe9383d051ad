"""Which device computes, in which floating-point type, and how much memory it can give."""

from __future__ import annotations

import os

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
    """Bytes that could be allocated now: the device's free memory, or the memory this machine still has available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
