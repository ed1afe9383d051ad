"""An engine process whose model always says the same.

``model_path`` is a JSON object: ``ids`` are said after every prompt, then the end of the turn; ``step_s`` is how long
a token takes; ``max_model_len`` the context. A prompt that holds the token 9999 breaks the model.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from worker.engine import process
from worker.engine.config import EngineConfig
from worker.engine.plan import StepPlan, StepResult, TokenMasks

EOS = 2
BREAKING = 9999


class Read:
    """Draws that are there already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class ScriptedRunner:
    block_size = 16
    num_blocks = 2048
    vocab_size = 49152
    eos_token_ids = (EOS,)
    device = "script"

    def __init__(self, ids: list[int], step_s: float, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._ids = ids
        self._step_s = step_s
        self._said: dict[int, int] = {}

    def forward(self, plan: StepPlan) -> list[int]:
        for key in plan.retired:
            del self._said[key]
        for new in plan.new:
            assert BREAKING not in new.token_ids, "the script breaks here"
            self._said[new.key] = 0
        return [span.key for span in plan.spans if span.sample]

    def sample(self, handle: Any, masks: TokenMasks | None = None) -> Read:
        time.sleep(self._step_s)
        tokens = []
        for key in handle:
            said = self._said[key]
            self._said[key] = said + 1
            at = said % (len(self._ids) + 1)
            tokens.append(self._ids[at] if at < len(self._ids) else EOS)
        return Read(StepResult(tokens))


def build(config: EngineConfig) -> ScriptedRunner:
    return ScriptedRunner(**json.loads(config.model_path))


if __name__ == "__main__":
    sys.exit(process.run(sys.argv[1], build))
