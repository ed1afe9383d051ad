"""What each brand of server does in its own way, as data; the adapters know families only.

The docstring of each stand-in under ``tests/standins/`` says what its brand sends, and where that is documented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from gateway.apis import Family

_HOSTED_CONTEXT: Final = 1_048_576
"""The longest of the models that these sell."""
CapField = Literal["max_tokens", "max_completion_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brand:
    family: Family
    prefix: str = "/v1"
    """Between a backend's base URL and an API's own path."""
    cap_field: CapField = "max_tokens"
    """Where a chat completion's cap is written if its client gave none."""
    cap_fields: frozenset[CapField] = frozenset(("max_tokens", "max_completion_tokens"))
    """Those it obeys in a chat completion; a cap in another one is moved."""
    usage_on_request: bool = True
    """Whether it takes ``stream_options.include_usage``."""
    ends_with_done: bool = True
    """Whether each of its streams has ``[DONE]`` at its end, so that one without it was cut."""
    probe_path: str = "/v1/models"
    """After the base URL: a GET that costs nothing."""
    context_length: int = 131_072
    """Tokens that a backend is held to take, if its operator does not say: rather too many than too few, for so much
    is reserved for a prompt at most."""
    key_header: str = "authorization"
    key_scheme: str = "Bearer "

    def key_headers(self, secret: str) -> dict[str, str]:
        """What bears a backend's secret."""
        return {self.key_header: self.key_scheme + secret}


BRANDS: Final[Mapping[str, Brand]] = MappingProxyType(
    {
        "penstock": Brand(family="penstock", probe_path="/health"),
        # Its reasoning models refuse max_tokens; all its chat models take max_completion_tokens.
        "openai": Brand(
            family="openai",
            cap_field="max_completion_tokens",
            cap_fields=frozenset(("max_completion_tokens",)),
            context_length=_HOSTED_CONTEXT,
        ),
        "vllm": Brand(family="openai", probe_path="/health"),
        "sglang": Brand(family="openai", probe_path="/health"),
        "trtllm": Brand(family="openai", probe_path="/health"),
        "ollama": Brand(family="openai", cap_fields=frozenset(("max_tokens",))),
        # Before 2026 it did not know max_completion_tokens, nor does llama-cpp-python's server.
        "llamacpp": Brand(family="openai", cap_fields=frozenset(("max_tokens",)), probe_path="/health"),
        # The base URL ends in /v1beta/openai, which is all the prefix there is.
        "google": Brand(family="openai", prefix="", probe_path="/models", context_length=_HOSTED_CONTEXT),
        "anthropic": Brand(family="anthropic", key_header="x-api-key", key_scheme="", context_length=_HOSTED_CONTEXT),
        # Nothing is taken for granted but what all of them know.
        "generic": Brand(family="openai", cap_fields=frozenset(("max_tokens",)), ends_with_done=False),
    }
)
