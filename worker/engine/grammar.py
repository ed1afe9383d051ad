"""Output that must follow a grammar: compiled beside the engine's loop, followed token by token, as masks.

``llguidance`` does the parsing: an Earley parser over a lazy lexer, which finds the tokens that may come next by
walking the vocabulary's trie. A grammar may be hostile: its size is bounded by the server, its work by the library's
own limits (fuel for building, fuel for each step), its nesting by a thread with a deep stack.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from worker.engine.messages import Grammar
from worker.engine.plan import TokenMasks
from worker.weights.gguf import GGUFFile
from worker.weights.vocabulary import Vocabulary

_CACHED_GRAMMARS: Final = 128
_BUFFERS: Final = 3
"""Mask buffers used in turn: two steps may be in flight, and their masks must stay while the next is filled."""
_DEEP_STACK: Final = 512 << 20
"""Bytes of address space for the stack of a thread that compiles. Long chains of references recurse natively: on a
plain stack of 8 MiB a schema of 1,000 of them ends the process."""
_LONGEST_MESSAGE: Final = 300
_MAX_MASK_THREADS: Final = 8

_LIMITS: Final = LLParserLimits(verbose_errors=False)
_stack_size_lock: Final = threading.Lock()


class GrammarFailure(Exception):
    """A grammar could not be followed; the message says why, for the one who asked."""


def check_grammar(grammar: Grammar) -> str | None:
    """What is wrong with a grammar, in words for its author; None if it compiles. Needs no model.

    Names of special tokens are not looked up. Takes about a millisecond for common schemas.
    """
    found: list[str] = []

    def check() -> None:
        try:
            found.append(LLMatcher.validate_grammar(_compilable(grammar), limits=_LIMITS))
        except ValueError as fault:
            found.append(str(fault))

    _start_deep_thread(check).join()
    return _readable(found[0]) if found[0] else None


class Grammars:
    """The grammars of one engine's open requests. All calls come from the engine's thread."""

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``model_path``: a GGUF file, read when the first grammar comes; ``vocab_size``: width of the logits, which
        may be more than the tokenizer's vocabulary; ``eos_token_ids``: allowed wherever the output may end.
        """
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._words = -(-vocab_size // 32)
        self._buffers: list[npt.NDArray[np.int32]] = [np.empty((0, self._words), np.int32)] * _BUFFERS
        self._turn = 0
        self._executor: LLExecutor | None = None
        self._matchers: dict[str, LLMatcher] = {}
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._waiting: dict[Grammar, list[str]] = {}
        self._finished: list[tuple[str, str | None]] = []
        self._jobs: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Grammar, LLMatcher | str]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Requests whose grammars ``ready`` has not told of yet."""
        return sum(map(len, self._waiting.values())) + len(self._finished)

    def start(self, request_id: str, grammar: Grammar) -> None:
        """Begin to compile a request's grammar. Requests with the same grammar share the work."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            self._matchers[request_id] = self._compiled[grammar].deep_copy()
            self._finished.append((request_id, None))
        elif grammar in self._waiting:
            self._waiting[grammar].append(request_id)
        else:
            self._waiting[grammar] = [request_id]
            if self._thread is None:
                self._thread = _start_deep_thread(self._compile)
            self._jobs.put(grammar)

    def ready(self) -> list[tuple[str, str | None]]:
        """Requests whose grammars were compiled since the last call, each with what was wrong, or None."""
        while True:
            try:
                grammar, compiled = self._results.get_nowait()
            except queue.Empty:
                break
            requests = self._waiting.pop(grammar)
            if isinstance(compiled, str):
                self._finished += [(request_id, compiled) for request_id in requests]
                continue
            self._compiled[grammar] = compiled
            if len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
            for request_id in requests:
                self._matchers[request_id] = compiled.deep_copy()
                self._finished.append((request_id, None))
        finished, self._finished = self._finished, []
        return finished

    def masks(self, sampled: Sequence[tuple[int, str]]) -> TokenMasks | None:
        """Which tokens may come next. ``sampled``: (row, request id) of the step's sampling spans with grammars.

        The masks stay as they are until two further calls. Tokens without text are never allowed, but the
        end-of-sequence ids where the output may end. Of a request whose grammar failed here, ``accept`` tells.
        """
        if not sampled:
            return None
        self._turn = (self._turn + 1) % _BUFFERS
        buffer = self._buffers[self._turn]
        if len(buffer) < len(sampled):
            buffer = self._buffers[self._turn] = np.zeros((max(len(sampled), 2 * len(buffer)), self._words), np.int32)
        matchers = [(self._matchers[request_id], at) for at, (_, request_id) in enumerate(sampled)]
        if len(matchers) == 1:
            fill_next_token_bitmask(matchers[0][0], buffer)
        else:
            if self._executor is None:
                self._executor = LLExecutor(max(1, min(_MAX_MASK_THREADS, (os.cpu_count() or 1) // 2)))
            fill_next_token_bitmask_par(self._executor, matchers, buffer)
        return TokenMasks([row for row, _ in sampled], buffer[: len(sampled)])

    def accept(self, request_id: str, token_id: int) -> bool:
        """Take the token that was drawn; whether the output is complete with it: nothing but an end may follow.

        Raises GrammarFailure if the grammar can't be followed any further; then the request must end.
        """
        matcher = self._matchers[request_id]
        if matcher.is_error() or not matcher.consume_token(token_id):
            raise GrammarFailure(f"The output's grammar could not be followed: {_readable(matcher.get_error())}")
        return matcher.is_stopped()

    def drop(self, request_id: str) -> None:
        """Forget a request, in whatever state it is. Unknown ids are ignored."""
        self._matchers.pop(request_id, None)
        self._finished = [one for one in self._finished if one[0] != request_id]
        for requests in self._waiting.values():
            if request_id in requests:
                requests.remove(request_id)

    def _compile(self) -> None:
        """Body of the compiling thread; it lives as long as the process."""
        tokenizer: LLTokenizer | None = None
        first_mask = np.empty((1, self._words), np.int32)
        while True:
            grammar = self._jobs.get()
            try:
                if tokenizer is None:
                    tokenizer = self._tokenizer()
                matcher = LLMatcher(tokenizer, _compilable(grammar), log_level=0, limits=_LIMITS)
                # Much is built only when the first mask is asked for: a hostile grammar takes a second here, where
                # nobody else waits for it.
                fill_next_token_bitmask(matcher, first_mask)
                wrong = matcher.get_error() if matcher.is_error() else ""
            except Exception as fault:
                # Whatever goes wrong is this request's end, not the thread's: others wait for it.
                wrong = str(fault) or type(fault).__name__
            if wrong:
                self._results.put((grammar, f"The grammar can't be followed: {_readable(wrong).rstrip('.')}."))
            else:
                self._results.put((grammar, matcher))

    def _tokenizer(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarFailure("the model has no end-of-sequence token, which every grammar needs")
        try:
            vocabulary = Vocabulary.from_gguf(GGUFFile(self._model_path).metadata)
        except OSError as fault:
            raise GrammarFailure(f"the model's vocabulary can't be read any more ({fault.strerror})") from fault
        return LLTokenizer(
            TokenizerWrapper(_Tokens(vocabulary, self._vocab_size, self._eos_token_ids[0])),
            eos_token=self._eos_token_ids,
            slices=LLTokenizer.json_slices(),
        )


class _Tokens:
    """A vocabulary as ``llguidance`` reads it, ``vocab_size`` tokens wide."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        tokens = list(vocabulary.token_bytes)
        for text, at in vocabulary.special_tokens.items():
            tokens[at] = text.encode()
        # Logits beyond the vocabulary are padding of the weights: a token without bytes is never allowed.
        self.tokens = (tokens + [b""] * (vocab_size - len(tokens)))[:vocab_size]
        self.special_token_ids = sorted(at for at in vocabulary.special_tokens.values() if at < vocab_size)
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of text that a grammar forces, up to the first byte that has no token."""
        ids = self._vocabulary.encode(text if isinstance(text, str) else text.decode())
        unknown = next((at for at, token_id in enumerate(ids) if token_id >= len(self._vocabulary)), len(ids))
        return ids[:unknown]


def _compilable(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _start_deep_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name="grammar", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(_DEEP_STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


_NAMES_OF_STATES: Final = {"NoExtensionBias": "no text fits it"}
"""The library's, where it says nothing else."""
_REASON: Final = re.compile(r"^error: (.*)$", re.MULTILINE)


def _readable(message: str) -> str:
    """The library's message on one line, without the excerpts of the grammar that it shows."""
    reason = _REASON.search(message)
    line = reason[1] if reason else message.split("\n", 1)[0].split("<state>", 1)[0].strip()
    line = _NAMES_OF_STATES.get(line, line)
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 3] + "..."
