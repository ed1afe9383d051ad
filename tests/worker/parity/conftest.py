from __future__ import annotations

import pytest

from tests.worker.parity.checkpoints import CONFIGS, Checkpoint, make


@pytest.fixture(scope="session", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make(request.param, tmp_path_factory.mktemp(request.param))
