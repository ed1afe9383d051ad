"""The Anthropic-compatible API."""
