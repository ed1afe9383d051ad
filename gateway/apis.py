"""The APIs that tenants call, and the wire families that backends speak."""

from __future__ import annotations

from typing import Final, Literal

Api = Literal["chat_completions", "completions", "embeddings", "responses", "messages"]
"""``messages`` is Anthropic's, the others are OpenAI's."""
Family = Literal["penstock", "openai", "anthropic"]
"""Our own workers, servers that are compatible with OpenAI's API, and Anthropic's API."""

CHATS: Final[frozenset[Api]] = frozenset(("chat_completions", "responses", "messages"))
"""Those whose requests can be told as a chat completion."""
SERVED_BY: Final[dict[Family, frozenset[Api]]] = {
    "penstock": frozenset((*CHATS, "completions", "embeddings")),
    "openai": frozenset((*CHATS, "completions", "embeddings")),
    "anthropic": CHATS,
}
"""What each family can be asked for, by translation where it has no such API itself."""
