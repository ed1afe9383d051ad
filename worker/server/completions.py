"""Plain completions: from a valid request to an answer in OpenAI's older shape, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from worker.engine.messages import EngineRequest
from worker.engine.output import TextStream
from worker.engine.plan import TokenLogprobs
from worker.protocol.completions import Completion, CompletionChoice
from worker.protocol.errors import bad_request
from worker.protocol.usage import Usage
from worker.server.answer import AnswerHead, Writer
from worker.server.call import Call
from worker.server.choices import Answer, Choice, Update
from worker.server.completion_parameters import CompletionParameters
from worker.server.inputs import encode_inputs
from worker.server.logprobs import CompletionTokens
from worker.server.metrics import RequestMetrics
from worker.server.sampling_parameters import draw_seed
from worker.server.service import ModelService, out_of_time
from worker.server.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode


class CompletionExchange:
    """One completion request and its answer."""

    endpoint = "completions"

    def __init__(self, service: ModelService, parameters: CompletionParameters, call: Call) -> None:
        self._service = service
        self._parameters = parameters
        self._call = call
        self.stream = parameters.stream
        self._head = AnswerHead(f"cmpl-{call.request_id.replace('-', '')}", int(time.time()), parameters.model)
        self._prompts: list[list[int]] = []

    async def start(self, metrics: RequestMetrics) -> Answer:
        """Hand the request to the engine. Raises ApiError; then nothing runs. The caller must close the answer."""
        service, parameters, drawing = self._service, self._parameters, self._parameters.drawing
        service.check_name(parameters.model)
        fill = _fill_in_middle(service.tokenizer, parameters.suffix)
        self._prompts = await encode_inputs(
            service, parameters.prompts, "prompt", add_special=parameters.add_special and fill is None
        )
        if fill is not None:
            self._prompts = [[*fill[0], *prompt, *fill[1]] for prompt in self._prompts]
        service.check_count(len(self._prompts) * drawing.choices, "prompt" if len(self._prompts) > 1 else "n")
        eos = service.engine.info.eos_token_ids
        requests: list[EngineRequest] = []
        for prompt in self._prompts:
            seed = draw_seed() if drawing.seed is None else drawing.seed
            # To compute a prompt without going on is to go on by a token that nobody sees.
            wanted = drawing.max_tokens or 1
            max_tokens = service.max_tokens(
                len(prompt),
                wanted,
                self._call,
                what="prompt has",
                param="prompt",
                field="max_tokens",
            )
            requests += [
                EngineRequest(
                    request_id=uuid4().hex,
                    prompt_token_ids=prompt,
                    sampling=drawing.of_choice(index, seed, eos),
                    max_tokens=max_tokens,
                    stop_token_ids=drawing.ends(eos),
                    priority=self._call.priority,
                    salt=self._call.salt,
                    tenant=self._call.tenant,
                    weight=self._call.weight,
                    grammar=drawing.grammar,
                )
                for index in range(drawing.choices)
            ]
        generations = await service.submit(requests, progress=self._call.metered)
        detokenizer = service.tokenizer.showing() if drawing.show_special else service.tokenizer
        choices = [
            Choice(
                at // drawing.choices,
                generation,
                TextStream(
                    detokenizer,
                    drawing.stop,
                    min_tokens=drawing.sampling.min_tokens,
                    include_stop=drawing.include_stop,
                    locate=parameters.logprobs,
                ),
                eos=() if drawing.ignore_eos else eos,
                mute=drawing.max_tokens == 0,
            )
            for at, generation in enumerate(generations)
        ]
        lengths = [len(prompt) for prompt in self._prompts]
        return Answer(lengths, choices, metrics, grammar_field=drawing.grammar_field)

    def writer(self) -> Writer:
        parameters, tokenizer = self._parameters, self._service.tokenizer
        texts: list[ChoiceText] = []
        for at, prompt in enumerate(self._prompts):
            echo = _echo(tokenizer, parameters.prompts[at], prompt) if parameters.echo else None
            for _ in range(parameters.drawing.choices):
                tokens = CompletionTokens(tokenizer, as_ids=parameters.tokens_as_ids) if parameters.logprobs else None
                texts.append(ChoiceText(echo, tokens))
        if self.stream:
            return StreamedCompletion(self._head, texts, include_usage=parameters.include_usage)
        return WholeCompletion(self._head, texts)


def _fill_in_middle(tokenizer: Tokenizer, suffix: str) -> tuple[list[int], list[int]] | None:
    """What goes before the prompt and after it, so that the model fills the gap before ``suffix``. Raises ApiError."""
    if not suffix:
        return None
    if tokenizer.fill_in_middle is None:
        raise bad_request(
            "This model has no tokens to mark a gap in a text, so it can't take 'suffix'. Leave it out.",
            param="suffix",
            code="unsupported_parameter",
        )
    before, after, middle = tokenizer.fill_in_middle
    return [*tokenizer.prefix_ids, before], [after, *tokenizer.encode(suffix), middle]


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the beginning of its answer's text. ``starts``: where each token begins, in characters."""

    text: str
    token_ids: Sequence[int]
    starts: Sequence[int]


def _echo(tokenizer: Tokenizer, given: str | list[int], token_ids: list[int]) -> Echo:
    # What the model wants in front of a text is no part of the text.
    hidden = len(tokenizer.prefix_ids)
    if not isinstance(given, str) or (hidden and token_ids == tokenizer.encode(given, True)):
        hidden = 0
    stream = TextStream(tokenizer.showing(), locate=True)
    text = stream.push(token_ids[hidden:], "length")
    return Echo(given if isinstance(given, str) else text, token_ids, [0] * hidden + stream.starts)


class ChoiceText:
    """The text of one choice as it is written: the prompt in front, where it is echoed, and tokens beside it."""

    def __init__(self, echo: Echo | None, tokens: CompletionTokens | None) -> None:
        self._echo = echo
        self.tokens = tokens
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._begun = False

    def add(self, update: Update) -> str:
        """The text that ``update`` adds; its tokens go to ``tokens``.

        Raises ApiError if time was over before the prompt's log-probabilities were known.
        """
        echo, tokens = self._echo, self.tokens
        text = ""
        self._prompt_logprobs += update.prompt_logprobs
        if echo is not None and update.began and not self._begun:
            text = echo.text
            if tokens is not None:
                if len(self._prompt_logprobs) + 1 < len(echo.token_ids):
                    raise out_of_time()
                tokens.add_first(echo.token_ids[0], echo.starts[0])
                for token, start in zip(self._prompt_logprobs, echo.starts[1:], strict=True):
                    tokens.add(token, start)
        self._begun |= update.began
        if tokens is not None:
            offset = 0 if echo is None else len(echo.text)
            for token, start in zip(update.logprobs, update.starts, strict=True):
                tokens.add(token, offset + start)
        return text + update.text


class WholeCompletion:
    """Writes an answer as one JSON body."""

    def __init__(self, head: AnswerHead, texts: Sequence[ChoiceText]) -> None:
        self._head = head
        self._texts = texts
        self._pieces: list[list[str]] = [[] for _ in texts]
        self._lasts: list[Update] = [Update(at) for at in range(len(texts))]

    def push(self, update: Update) -> list[bytes]:
        self._pieces[update.choice].append(self._texts[update.choice].add(update))
        self._lasts[update.choice] = update
        return []

    def end(self, usage: Usage) -> list[bytes]:
        choices = [
            CompletionChoice(
                at,
                "".join(self._pieces[at]),
                None if text.tokens is None else text.tokens.take(),
                last.finish_reason,
                last.stop_reason,
            )
            for at, (text, last) in enumerate(zip(self._texts, self._lasts, strict=True))
        ]
        head = self._head
        return [_encode(Completion(id=head.id, created=head.created, model=head.model, choices=choices, usage=usage))]


class StreamedCompletion:
    """Writes an answer in chunks: text as it comes, one finish reason a choice; at the end the usage, if asked for."""

    def __init__(self, head: AnswerHead, texts: Sequence[ChoiceText], *, include_usage: bool) -> None:
        self._head = head
        self._texts = texts
        self._include_usage = include_usage

    def push(self, update: Update) -> list[bytes]:
        choice = self._texts[update.choice]
        text = choice.add(update)
        logprobs = None if choice.tokens is None else choice.tokens.take()
        if not text and update.finish_reason is None and not (logprobs and logprobs.tokens):
            return []
        stop_reason = msgspec.UNSET if update.finish_reason is None else update.stop_reason
        return [self._event([CompletionChoice(update.choice, text, logprobs, update.finish_reason, stop_reason)])]

    def end(self, usage: Usage) -> list[bytes]:
        return [self._event([], usage)] if self._include_usage else []

    def _event(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        head = self._head
        return _encode(
            Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=usage if self._include_usage else msgspec.UNSET,
            )
        )
