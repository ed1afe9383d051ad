"""Log-probabilities as the two protocols write them."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engine.plan import TokenLogprobs
from worker.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from worker.protocol.completions import CompletionLogprobs
from worker.server.tokenizer import Tokenizer

_LEAST = -9999.0
"""What OpenAI's API writes for tokens that can't come: JSON has no infinity."""


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChoiceLogprobs:
    return ChoiceLogprobs([_chat_token(token, tokenizer) for token in tokens])


def _chat_token(token: TokenLogprobs, tokenizer: Tokenizer) -> TokenLogprob:
    spelled = tokenizer.token_bytes(token.token_id)
    return TokenLogprob(
        spelled.decode(errors="replace"),
        max(token.logprob, _LEAST),
        list(spelled),
        [
            TopLogprob(top.decode(errors="replace"), max(logprob, _LEAST), list(top))
            for top, logprob in (
                (tokenizer.token_bytes(token_id), logprob)
                for token_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True)
            )
        ],
    )


class CompletionTokens:
    """Gathers the tokens of one choice's text for the older shape."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """``as_ids``: whether tokens are named ``token_id:5`` rather than by their text."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._offsets: list[int] = []
        self._logprobs: list[float | None] = []
        self._tokens: list[str] = []
        self._tops: list[dict[str, float] | None] = []

    def add(self, token: TokenLogprobs, offset: int) -> None:
        """``offset``: where in the text the token begins."""
        self.add_first(token.token_id, offset)
        self._logprobs[-1] = max(token.logprob, _LEAST)
        tops = {
            self._name(token_id): max(logprob, _LEAST)
            for token_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True)
        }
        # The token that was drawn is always among them.
        tops.setdefault(self._tokens[-1], max(token.logprob, _LEAST))
        self._tops[-1] = tops

    def add_first(self, token_id: int, offset: int) -> None:
        """The first token of a prompt: nothing stands before it, so it has no log-probability."""
        self._offsets.append(offset)
        self._logprobs.append(None)
        self._tokens.append(self._name(token_id))
        self._tops.append(None)

    def take(self) -> CompletionLogprobs:
        """All that was added since the last call."""
        taken = CompletionLogprobs(self._offsets, self._logprobs, self._tokens, self._tops)
        self._offsets, self._logprobs, self._tokens, self._tops = [], [], [], []
        return taken

    def _name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            # Tokens that are part of a character would all look alike.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
