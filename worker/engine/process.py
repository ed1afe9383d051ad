"""The engine process: ``python -m worker.engine.process DIRECTORY`` with an EngineConfig as JSON on standard input.

Speaks over two sockets in ``DIRECTORY`` (see ``worker.engine.messages``). Standard input stays open for as long as
the server lives; when it closes, this process ends at once, whatever it is doing.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
import zmq

from worker.engine.config import EngineConfig
from worker.engine.engine import Engine, ModelRunner, refusal
from worker.engine.messages import (
    INPUT_SOCKET,
    OUTPUT_SOCKET,
    AbortRequests,
    Control,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Failed,
    FromEngine,
    KVEventBatch,
    Ready,
    StepOutputs,
    encoder,
    to_engine_decoder,
)
from worker.engine.request import EngineError

log = logging.getLogger("penstock.engine")

EXIT_FAILED = 1


def run(directory: str, build: Callable[[EngineConfig], ModelRunner]) -> int:
    """Load a model and serve it until the server is gone; the status to exit with."""
    # A signal to the whole process group, or to a service's every process, is the server's to answer: it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # the server went away while this process was starting
        shutil.rmtree(directory, ignore_errors=True)
        return 0
    config = msgspec.json.decode(line, type=EngineConfig)
    threading.Thread(target=_exit_with_server, args=(directory,), name="server-watch", daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        sender.connect(f"ipc://{directory}/{OUTPUT_SOCKET}")
        receiver.set_hwm(0)

        def send(message: FromEngine) -> None:
            # Waits when the server is a thousand messages behind: the engine then pauses rather than fill memory.
            sender.send(encoder.encode(message))

        try:
            started = time.monotonic()
            log.info("loading %s", config.model_path)
            engine = Engine(config, build(config))
            log.info(
                "ready after %.1f s: %d KV blocks of %d tokens, sequences up to %d tokens",
                time.monotonic() - started,
                engine.info.num_blocks,
                engine.info.block_size,
                engine.info.max_model_len,
            )
        except (OSError, ValueError) as error:  # as files and sizes that can't be used are told
            send(Failed(f"The engine could not load {config.model_path}: {error}"))
            return EXIT_FAILED
        except Exception as error:
            log.exception("the model could not be loaded")
            send(Failed(f"The engine could not load {config.model_path}: {error}"))
            return EXIT_FAILED
        gc.collect()
        gc.freeze()  # the model's objects stay: collections need not walk them
        receiver.bind(f"ipc://{directory}/{INPUT_SOCKET}")
        send(Ready(engine.info))
        try:
            serve(engine, receiver, send)
        except Exception as error:
            log.exception("a step failed; all open requests fail with it")
            send(Failed(f"The engine failed while running ({type(error).__name__}); its log has the details."))
            return EXIT_FAILED


def serve(engine: Engine, receiver: zmq.Socket[bytes], send: Callable[[FromEngine], None]) -> NoReturn:
    """Take what arrives, run a step, tell what came of it; sleep while there is nothing to do. Ends by an error."""
    told = EngineStats()

    def tell(outputs: list[EngineOutput]) -> None:
        nonlocal told
        if events := engine.kv_events():
            send(KVEventBatch(events))
        stats = engine.stats
        if outputs or stats != told:
            send(StepOutputs(outputs, stats))
            told = stats

    while True:
        outputs: list[EngineOutput] = []
        while receiver.poll(_milliseconds(0 if outputs else engine.wait_s)):
            message = to_engine_decoder.decode(receiver.recv())
            if isinstance(message, EngineRequest):
                try:
                    engine.add(message)
                except EngineError as error:
                    outputs.append(refusal(message.request_id, error))
            elif isinstance(message, AbortRequests):
                outputs += engine.abort(message.request_ids)
            elif isinstance(message, Control):
                done = engine.control(message)
                # Who asked finds the gauges and the cache as they are now.
                tell(outputs)
                outputs = []
                send(done)
        tell(outputs + engine.step())


def _milliseconds(seconds: float | None) -> int | None:
    """As ``poll`` takes them: never less than asked for, or the loop would spin; None: for ever."""
    return None if seconds is None else math.ceil(seconds * 1000)


def _exit_with_server(directory: str) -> None:
    """Wait until the server closes our standard input, by intent or by dying, and end the process there and then."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _build(config: EngineConfig) -> ModelRunner:
    # Here and not above: the messages and the scheduler must stay importable without torch.
    from worker.execution.model_runner import ModelRunner as TorchRunner

    return TorchRunner(config)


def main() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    sys.exit(run(sys.argv[1], _build))


if __name__ == "__main__":
    main()
