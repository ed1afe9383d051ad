"""Embeddings: from a request's body to the vectors of its inputs."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import msgspec

from worker.engine.messages import EngineRequest
from worker.engine.output import TextStream
from worker.engine.plan import Pooling, SamplingParams
from worker.protocol.embeddings import Embedding, EmbeddingList, EmbeddingRequest
from worker.protocol.errors import bad_request, context_length_exceeded
from worker.protocol.usage import Usage
from worker.server.answer import Writer
from worker.server.body import Neutral, convert, decode, neutral, refuse_unsupported
from worker.server.call import Call
from worker.server.choices import Answer, Choice, Update
from worker.server.inputs import Inputs, encode_inputs, read_inputs
from worker.server.metrics import RequestMetrics
from worker.server.service import ModelService, out_of_time

_UNSUPPORTED: Final[dict[str, Neutral]] = {"truncate_prompt_tokens": neutral(), "normalize": neutral(True)}

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EmbeddingParameters:
    """A valid request."""

    model: str
    inputs: Inputs
    pooling: Pooling
    as_base64: bool
    add_special: bool


def read_embedding_parameters(body: bytes, vocab_size: int, hidden_size: int) -> EmbeddingParameters:
    """Decode and check a request body. ``hidden_size``: the length of the vectors. Raises ApiError (400)."""
    fields = decode(body, "'model' and 'input'")
    refuse_unsupported(fields, _UNSUPPORTED)
    request = convert(fields, EmbeddingRequest)
    if request.dimensions not in (None, hidden_size):
        raise bad_request(
            f"This model's embeddings have {hidden_size} dimensions, and fewer would not mean the same. "
            "Leave 'dimensions' out.",
            param="dimensions",
            code="unsupported_parameter",
        )
    return EmbeddingParameters(
        model=request.model,
        inputs=read_inputs(request.input, "input", vocab_size),
        pooling=request.pooling or "mean",
        as_base64=request.encoding_format == "base64",
        add_special=request.add_special_tokens is not False,
    )


class EmbeddingExchange:
    """One embedding request and its answer."""

    endpoint = "embeddings"
    stream = False

    def __init__(self, service: ModelService, parameters: EmbeddingParameters, call: Call) -> None:
        self._service = service
        self._parameters = parameters
        self._call = call

    async def start(self, metrics: RequestMetrics) -> Answer:
        """Hand the request to the engine. Raises ApiError; then nothing runs. The caller must close the answer."""
        service, parameters, call = self._service, self._parameters, self._call
        service.check_name(parameters.model)
        prompts = await encode_inputs(service, parameters.inputs, "input", add_special=parameters.add_special)
        for at, prompt in enumerate(prompts):
            if len(prompt) > service.context:
                raise context_length_exceeded(
                    f"This model's context is {service.context} tokens, but input {at} has {len(prompt)}. Shorten it.",
                    param="input",
                )
        service.check_count(len(prompts), "input")
        requests = [
            EngineRequest(
                request_id=uuid4().hex,
                prompt_token_ids=prompt,
                sampling=SamplingParams(),
                max_tokens=0,
                stop_token_ids=[],
                priority=call.priority,
                salt=call.salt,
                tenant=call.tenant,
                weight=call.weight,
                pooling=parameters.pooling,
            )
            for prompt in prompts
        ]
        generations = await service.submit(requests, progress=call.metered)
        choices = [Choice(at, made, TextStream(service.tokenizer)) for at, made in enumerate(generations)]
        return Answer([len(prompt) for prompt in prompts], choices, metrics)

    def writer(self) -> Writer:
        return EmbeddingWriter(self._parameters.model, as_base64=self._parameters.as_base64)


class EmbeddingWriter:
    """Writes the vectors, in the order of the inputs, as one JSON body."""

    def __init__(self, model: str, *, as_base64: bool) -> None:
        self._model = model
        self._as_base64 = as_base64
        self._vectors: dict[int, list[float]] = {}

    def push(self, update: Update) -> list[bytes]:
        """Raises ApiError if an input's time was over before its vector was made."""
        if update.finish_reason == "length":
            raise out_of_time()
        if update.embedding is not None:
            self._vectors[update.choice] = normalised(update.embedding)
        return []

    def end(self, usage: Usage) -> list[bytes]:
        data = [
            Embedding(index=at, embedding=base64_of(vector) if self._as_base64 else vector)
            for at, vector in sorted(self._vectors.items())
        ]
        return [_encode(EmbeddingList(data=data, model=self._model, usage=usage))]


def normalised(vector: Sequence[float]) -> list[float]:
    """``vector`` at length 1 (L2); the zero vector as it is."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


def base64_of(vector: Sequence[float]) -> str:
    """Little-endian 32-bit floats, as OpenAI's client reads them."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
