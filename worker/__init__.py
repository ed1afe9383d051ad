"""Penstock worker: a paged-attention, continuous-batching inference engine behind an OpenAI-compatible door."""
