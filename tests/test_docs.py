"""What the documents promise, held against the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOORS = ["gateway/pipeline.py", "gateway/refusals.py", "gateway/order.py", "gateway/http/client.py"]
DOORS += ["gateway/http/openai/chat.py", "gateway/http/inference.py", "gateway/backends/faults.py"]
DOORS += ["gateway/http/cors.py", "gateway/http/websocket.py", "gateway/http/websocket_session.py"]
DOORS += ["gateway/http/openai/inputs.py", "gateway/backends/openai_errors.py"]


def test_every_error_code_of_the_gateway_is_documented() -> None:
    told = (ROOT / "docs/api.md").read_text()
    codes = set()
    for path in DOORS:
        source = (ROOT / path).read_text()
        codes |= set(re.findall(r'code="([a-z_]+)"', source))
        codes |= set(re.findall(r'BackendFault\(\s*"([a-z_]+)"', source))
    assert len(codes) > 10
    assert {code for code in codes if f"`{code}`" not in told} == set()


def test_the_schema_is_said_to_be_where_it_is() -> None:
    told = (ROOT / "docs/api.md").read_text()
    assert "/docs/openapi.json" in told
    assert "/schema" not in told
