"""What a worker speaks on the wire: requests, answers, errors, SSE framing, metering, registration.

This package is the one thing that the gateway imports from ``worker``. It imports nothing else of ``worker``, and no
torch.
"""
