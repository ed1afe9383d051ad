"""``penstock-worker`` as it is, but with the scripted engine; ``SCRIPT`` in the environment is its script."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import msgspec

from worker import cli
from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig

ENGINE = [sys.executable, str(Path(__file__).with_name("scripted_engine.py"))]
start = EngineClient.start


async def start_scripted(config: EngineConfig) -> EngineClient:
    return await start(msgspec.structs.replace(config, model_path=os.environ["SCRIPT"]), command=ENGINE)


EngineClient.start = functools.partial(start_scripted)  # type: ignore[method-assign]
cli.main()
