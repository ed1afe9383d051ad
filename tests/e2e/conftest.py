from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.stack import Stack, eventually


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("penstock"))
    stack.start()
    yield stack
    assert stack.stop() == 0


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """The running stack, whole again before and after whatever the test does to it."""
    yield shared_stack
    eventually(shared_stack.recovered, limit_s=60, what="all is well again")


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key, max_retries=0, timeout=60) as client:
        yield client
