"""The far side of an EngineClient, played from a script: for what a real engine says rarely, or never when asked.

Run as a script it is an engine process whose ``model_path`` is a JSON object:

- ``outputs``: by request id, the outputs as objects of EngineOutput's fields, each sent in a message of its own; other
  requests get one token, or an error if they arrive while this engine is asleep;
- ``refuse``: control actions that are refused, by action, and with which words; ``sleep`` is refused anyway while a
  request named ``open`` is open;
- ``control_s``: how long sleep and wake take. Messages are taken one after the other, as they come.

It says what it obeyed in the stats: ``steps`` counts wakes, ``preemptions`` sleeps that happened.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import msgspec
import zmq

from worker.engine.config import EngineConfig
from worker.engine.messages import (
    INPUT_SOCKET,
    OUTPUT_SOCKET,
    AbortRequests,
    Control,
    ControlDone,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FromEngine,
    KVEventBatch,
    Ready,
    StepOutputs,
    encoder,
    to_engine_decoder,
)
from worker.engine.plan import TokenLogprobs
from worker.protocol.kv_events import BlockRemoved, BlockStored, CacheCleared

INFO = EngineInfo(
    max_model_len=1000, num_blocks=9, block_size=16, vocab_size=1000, eos_token_ids=[0], device="script", hidden_size=4
)
EVENTS = [BlockStored([b"\x01\xff"], None, 16, [7] * 16), BlockRemoved([b"\x01\xff"]), CacheCleared()]
"""What a reset of the cache tells."""


def output_of(request_id: str, fields: dict[str, Any]) -> EngineOutput:
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            fields[name] = [TokenLogprobs(*entry) for entry in fields[name]]
    return EngineOutput(request_id, **fields)


def play(directory: str) -> None:
    script = json.loads(msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig).model_path)
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), os._exit(0)), daemon=True).start()
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    sender.connect(f"ipc://{directory}/{OUTPUT_SOCKET}")
    receiver.bind(f"ipc://{directory}/{INPUT_SOCKET}")

    def send(message: FromEngine) -> None:
        sender.send(encoder.encode(message))

    send(Ready(INFO))
    asleep = is_open = False
    wakes = sleeps = 0

    def tell(*outputs: EngineOutput) -> None:
        send(StepOutputs(list(outputs), EngineStats(steps=wakes, preemptions=sleeps, sleeping=int(asleep))))

    while True:
        message = to_engine_decoder.decode(receiver.recv())
        if isinstance(message, EngineRequest):
            name = message.request_id
            if name in script.get("outputs", {}):
                for fields in script["outputs"][name]:
                    tell(output_of(name, fields))
            elif name == "open":
                is_open = True
            elif asleep:
                tell(EngineOutput(name, [], "error", "it came while the engine slept", error_kind="rejected"))
            else:
                tell(EngineOutput(name, [5], "length"))
        elif isinstance(message, AbortRequests):
            is_open = False
            tell(*(EngineOutput(name, [], "abort") for name in message.request_ids))
        elif isinstance(message, Control):
            refusal = script.get("refuse", {}).get(message.action)
            if message.action == "sleep" and is_open:
                refusal = "requests are open"
            if refusal is None and message.action == "reset_cache":
                send(KVEventBatch(EVENTS))
            elif refusal is None:
                time.sleep(script.get("control_s", 0))
                sleeps += message.action == "sleep" and not asleep
                wakes += message.action == "wake" and asleep
                asleep = message.action == "sleep"
            tell()
            send(ControlDone(message.id, refusal))


if __name__ == "__main__":
    play(sys.argv[1])
