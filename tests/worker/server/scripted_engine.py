"""An engine process whose model always says the same.

``model_path`` is a JSON object: ``ids`` are said after every prompt, then the end of the turn; ``step_s`` is how long
a token takes; ``max_model_len`` the context; so many wakes as ``failing_wakes`` says fail. A prompt that holds the
token 9999 breaks the model.
"""

from __future__ import annotations

import json
import sys
import time

from worker.engine import process
from worker.engine.config import EngineConfig
from worker.engine.plan import (
    CacheGroup,
    NewSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
    Transfer,
    TransferResult,
)

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
    cache_groups = (CacheGroup(),)
    num_host_blocks = 0
    hidden_size = 64
    model_fingerprint = "script"

    def __init__(self, ids: list[int], step_s: float, max_model_len: int, failing_wakes: int = 0) -> None:
        self.max_model_len = max_model_len
        self._failing_wakes = failing_wakes
        self._ids = ids
        self._step_s = step_s
        self._said: dict[int, int] = {}
        self._known: dict[int, NewSequence] = {}

    def forward(self, plan: StepPlan) -> StepPlan:
        for key in plan.retired:
            del self._said[key], self._known[key]
        for new in plan.new:
            assert BREAKING not in new.token_ids, "the script breaks here"
            self._said[new.key] = len(new.token_ids) - new.num_prompt
            self._known[new.key] = new
        return plan

    def sample(self, handle: StepPlan, masks: TokenMasks | None = None) -> Read:
        time.sleep(self._step_s)
        tokens = []
        logprobs = {}
        prompt_logprobs = {}
        embeddings = {}
        for span in handle.spans:
            known = self._known[span.key]
            end = span.start + span.count
            if (top := known.sampling.prompt_logprobs) is not None:
                told = known.token_ids[span.start + 1 : min(end + 1, known.num_prompt)]
                prompt_logprobs[span.key] = [self._logprobs(token, top) for token in told]
            if span.sample:
                said = self._said[span.key]
                self._said[span.key] = said + 1
                at = said % (len(self._ids) + 1)
                tokens.append(self._ids[at] if at < len(self._ids) else EOS)
                if (top := known.sampling.logprobs) is not None:
                    logprobs[span.key] = self._logprobs(tokens[-1], top)
            elif known.pooling is not None and end == len(known.token_ids):
                embeddings[span.key] = [float(known.token_ids[0])] + [1.0] * (self.hidden_size - 1)
        return Read(StepResult(tokens, logprobs, prompt_logprobs, embeddings))

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        """The token is the likeliest; those after it in the vocabulary follow."""
        others = [(token + index) % self.vocab_size for index in range(top)]
        return TokenLogprobs(token, -0.25, 1, others, [-0.25 * (1 + index) for index in range(top)])

    def transfer(self, transfer: Transfer) -> None:
        raise AssertionError("the script has one tier")

    def transfers_done(self) -> list[TransferResult]:
        return []

    def sleep(self, level: int) -> None:
        pass

    def wake(self) -> None:
        if self._failing_wakes:
            self._failing_wakes -= 1
            raise OSError("/models/secret.gguf is gone")


def build(config: EngineConfig) -> ScriptedRunner:
    return ScriptedRunner(**json.loads(config.model_path))


if __name__ == "__main__":
    sys.exit(process.run(sys.argv[1], build))
