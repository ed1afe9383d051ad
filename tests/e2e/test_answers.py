"""What a tenant's client sees when all is well, through the official SDK."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.stack import MODEL, Stack, eventually

pytestmark = pytest.mark.e2e

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = [
    f"{task} {subject}"
    for task in ("Write one sentence about", "Name three facts on", "What is", "Tell a short story of")
    for subject in ("the sea.", "a clockwork owl.", "prime numbers.", "bread and butter.")
]


def streamed_text(client: openai.OpenAI, prompt: str, max_tokens: int = 12) -> str:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_whole_answer_and_its_row(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32)
    answer = raw.parse()
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.model == MODEL
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    row = stack.row(raw.headers["x-request-id"])
    assert row["status"] == "ok"
    assert (row["prompt_tokens"], row["completion_tokens"]) == (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
    )
    # 0.10 and 0.40 USD per million tokens are 100 and 400 nano-USD a token.
    assert row["charged_nano_usd"] == 100 * row["prompt_tokens"] + 400 * row["completion_tokens"]
    assert Decimal(raw.headers["x-penstock-cost-usd"]) == Decimal(row["charged_nano_usd"]) / 10**9
    assert row["streamed"] is False


def test_streamed_answer_equals_the_whole_one_and_usage_comes_once(stack: Stack, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CAPITAL,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1
    assert chunks[-1].choices == []
    assert usages[0].completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_a_stream_without_the_option_has_no_usage_but_is_metered(stack: Stack) -> None:
    body = {"model": MODEL, "messages": CAPITAL, "temperature": 0, "max_tokens": 16, "stream": True}
    headers = {"authorization": f"Bearer {stack.key}"}
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert "penstock-meter" not in answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert all(event["choices"] for event in events)
    assert not any(event.get("usage") for event in events)
    row = stack.row(answer.headers["x-request-id"])
    assert (row["status"], row["streamed"]) == ("ok", True)
    assert row["completion_tokens"] == 16 or events[-1]["choices"][0]["finish_reason"] == "stop"
    assert row["prompt_tokens"] > 0


def test_sixteen_concurrent_streams_equal_each_one_alone(stack: Stack, client: openai.OpenAI) -> None:
    alone = [streamed_text(client, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: streamed_text(client, prompt), PROMPTS))
    assert together == alone
    assert len(set(alone)) == len(PROMPTS)


def test_stop_seed_and_caps_reach_the_engine(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Count: one, two, three, four, five."}]}
    stopped = client.chat.completions.create(**ask, temperature=0, max_tokens=60, stop=[","])  # type: ignore[call-overload]
    assert "," not in stopped.choices[0].message.content
    assert stopped.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(**ask, temperature=0, max_completion_tokens=3)  # type: ignore[call-overload]
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (3, "length")
    draws = [
        client.chat.completions.create(**ask, temperature=1.5, seed=seed, max_tokens=12).choices[0].message.content  # type: ignore[call-overload]
        for seed in (7, 7, 8)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_the_printed_command_works_as_pasted(stack: Stack) -> None:
    banner = stack.output.read_text()
    start = banner.index("  curl -N ")
    command = banner[start : banner.index("\n\n", start)]
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    events = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert "Paris" in text
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_the_readmes_example_works_as_it_stands(stack: Stack) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = readme.split("```python\n")[1].split("```")[0]
    environment = stack.environment() | stack.exports
    done = subprocess.run([sys.executable, "-c", example], env=environment, capture_output=True, text=True, timeout=120)
    assert "Paris" in done.stdout, done.stderr


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_usage_is_shown_to_the_operator(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=CAPITAL, max_tokens=4)
    stack.row(raw.headers["x-request-id"])
    rows = stack.rows("tenant_id = (SELECT id FROM tenants WHERE name = 'demo')")
    report = json.loads(stack.cli("usage", "--tenant", "demo", "--json"))
    total = sum(row["charged_nano_usd"] for row in rows)
    text = json.dumps(report)
    assert str(Decimal(total) / 10**9).rstrip("0") in text or str(total) in text
    shown = stack.cli("usage", "--tenant", "demo")
    assert MODEL in shown
    assert f"{Decimal(total) / 10**9:.9f}" in shown
    admin = {"authorization": f"Bearer {stack.exports['PENSTOCK_ADMIN_KEY']}"}
    answer = httpx.get(f"{stack.url}/admin/v1/usage", params={"tenant": "demo"}, headers=admin)
    assert answer.status_code == 200
    assert str(sum(row["completion_tokens"] for row in rows)) in answer.text
    refused = httpx.get(f"{stack.url}/admin/v1/usage", headers={"authorization": f"Bearer {stack.key}"})
    assert refused.status_code in (401, 403)


def test_operators_pages(stack: Stack) -> None:
    assert httpx.get(f"{stack.url}/healthz").status_code == 200
    assert httpx.get(f"{stack.url}/readyz").status_code == 200
    assert "html" in httpx.get(f"{stack.url}/docs", follow_redirects=True).headers["content-type"]
    assert eventually(lambda: stack.worker_load() == (0, 0), what="idle worker")
