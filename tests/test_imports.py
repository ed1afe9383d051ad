"""Imports run one way: doors, pipeline, rooms, database; and each program keeps to its own side."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE_ENGINE = ["request", "plan", "scheduler", "config", "messages", "output", "client", "generation", "engine"]
PURE_ENGINE += ["kv_cache", "kv_connector", "block_pool", "cache_groups", "cache_events", "sequence_blocks"]
PURE_ENGINE += ["transfer_leases"]
PURE_ENGINE += ["admission", "roster", "retirement", "preemption", "waiting_queue", "turns"]
PURE_ENGINE += ["fairness", "compute_cost", "deadlines"]

# room -> rooms of the gateway that it may import (itself, and the plain modules beside them, always).
GATEWAY_ROOMS = {
    "db": set(),
    "tenants": {"db", "routing", "billing", "redaction"},
    "billing": {"db", "tenants", "admission"},
    "admission": {"tenants", "billing"},
    "routing": {"db", "tenants"},
    "translation": {"ask", "billing"},
    "tokens": {"routing", "ask"},
    "assembly": {"billing", "translation", "backends"},
    "redaction": set(),
    "backends": {"routing", "billing", "ask", "translation", "observability"},
    "idempotency": {"admission", "tenants", "billing", "observability"},
    "verify": {"admission", "billing", "tenants", "db"},
    "observability": {"billing", "routing"},
    "ask": {"tenants"},
    "refusals": {"admission", "billing"},
    "order": {"ask", "tenants", "admission", "billing", "routing", "backends", "tokens"},
    "recording": {"ask", "assembly", "billing", "cache", "promptlog"},
    "answer": {"ask", "order", "recording", "admission", "billing", "backends", "observability"},
    "cached_answer": {"ask", "order", "recording", "admission", "assembly", "billing", "cache", "observability"},
    "memory": {"ask", "order", "recording", "admission", "cache", "promptlog", "routing", "tenants"},
    "memory_rooms": {"admission", "assembly", "cache", "datakeys", "db", "observability", "promptlog", "redaction"},
    "administration": {"admission", "cache", "db", "promptlog", "tenants"},
    "pipeline": {"ask", "refusals", "order", "answer", "cached_answer", "memory", "cache", "observability"}
    | {"tenants", "admission", "billing", "routing", "tokens", "backends", "idempotency", "db"},
    "datakeys": {"db"},
    "cache": {"admission", "ask", "backends", "billing", "datakeys", "db"},
    "promptlog": {"admission", "datakeys", "db"},
    "responses": {"ask", "translation", "db", "tenants"},
    "http": {"pipeline", "ask", "answer", "translation", "responses", "observability"}
    | {"administration", "cache", "datakeys", "memory", "promptlog"}
    | {"tenants", "billing", "routing", "backends", "tokens", "admission", "db"},
    "local": {"cli", "tenants", "billing", "db", "admission", "routing"},
    "cli": {"app", "http", "local", "backends", "tenants", "billing", "db", "admission", "routing", "verify"}
    | {"administration", "assembly", "cache", "datakeys", "idempotency", "promptlog", "responses"},
    "app": {"http", "pipeline", "responses", "observability"}
    | {"administration", "cache", "memory", "memory_rooms", "promptlog"}
    | {"tenants", "admission", "billing", "routing", "tokens", "backends", "idempotency", "db"},
}
PLAIN_MODULES = {
    "policies",
    "settings",
    "clock",
    "ids",
    "telemetry",
    "redis_url",
    "secret_key",
    "answerable",
    "apis",
    "long_work",
}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", sources("gateway"), ids=lambda path: str(path.relative_to(ROOT)))
def test_gateway_imports_only_the_protocol_of_worker_and_runs_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT / "gateway")
    room = relative.parts[0].removesuffix(".py")
    for name in imports_of(path):
        assert not inside(name, "kernels"), f"{path} imports {name}"
        assert not inside(name, "worker") or inside(name, "worker.protocol"), f"{path} imports {name}"
        if inside(name, "gateway") and room not in PLAIN_MODULES and room != "__init__":
            target = name.split(".")[1] if "." in name else ""
            allowed = GATEWAY_ROOMS[room] | PLAIN_MODULES | {room}
            assert target in allowed, f"{relative} (room {room}) imports {name}"


@pytest.mark.parametrize("path", sources("worker"), ids=lambda path: str(path.relative_to(ROOT)))
def test_worker_never_imports_gateway(path: Path) -> None:
    protocol = path.is_relative_to(ROOT / "worker/protocol")
    for name in imports_of(path):
        assert not inside(name, "gateway"), f"{path} imports {name}"
        if protocol:
            assert not inside(name, "torch"), f"{path} imports {name}"
            assert not inside(name, "worker") or inside(name, "worker.protocol"), f"{path} imports {name}"


@pytest.mark.parametrize("path", sources("kernels"), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_import_neither_program(path: Path) -> None:
    for name in imports_of(path):
        assert not inside(name, "gateway"), f"{path} imports {name}"
        assert not inside(name, "worker"), f"{path} imports {name}"


def loaded_by(statement: str) -> set[str]:
    probe = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", PURE_ENGINE)
def test_the_engine_bookkeeping_loads_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import worker.engine.{module}")


def test_the_gateway_loads_no_torch() -> None:
    assert "torch" not in loaded_by("import gateway.app")


def test_kernels_stands_beside_the_hub_package_of_the_same_name() -> None:
    """`transformers` looks for a package named ``kernels``; ours must not be taken for it."""
    loaded = loaded_by("import kernels; import transformers")
    assert "transformers" in loaded
    assert "triton" not in loaded_by("import kernels")
