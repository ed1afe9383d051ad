"""Logits and greedy tokens of each kind of attention against transformers in fp32, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.worker.parity.checkpoints import CONTEXT, WINDOW, Checkpoint, changed, prompt
from tests.worker.parity.driving import Driver
from tests.worker.parity.runners import make_config, make_runner

TOLERANCE = 2e-4
LENGTHS = [1, 2, 15, 16, 17, 33, WINDOW - 1, WINDOW, WINDOW + 1, 64, 100, 127, 128, 129, 150, 200]
DECODED = 24


@pytest.fixture(params=[16, 128])
def driver(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Driver]:
    """With blocks that are copied together, and with blocks that are read where they lie."""
    made = Driver(make_runner(make_config(checkpoint, request.param, 600)))
    yield made
    made.close()


def generate(
    driver: Driver, prompts: list[list[int]], chunks: list[int], decoded: int
) -> list[tuple[list[int], torch.Tensor]]:
    """Run prompts together, each in chunks of its own size, and decode greedily: for each its tokens with those drawn,
    and the logits that they were drawn from."""
    texts = [list(tokens) for tokens in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    new = [driver.new(key, tokens) for key, tokens in enumerate(texts)]
    while any(len(drawn) < decoded for drawn in logits):
        running = [key for key in range(len(texts)) if len(logits[key]) < decoded]
        spans = [driver.span(key, min(chunks[key], driver.known[key] - driver.computed[key])) for key in running]
        spans.sort(key=lambda span: (span.count > 1 or not span.sample, span.key))
        result = driver.logits(new, spans)
        new = []
        for index, span in enumerate(span for span in spans if span.sample):
            assert result is not None
            logits[span.key].append(result[index].clone())
            texts[span.key].append(int(result[index].argmax()))
    return [(text, torch.stack(rows)) for text, rows in zip(texts, logits, strict=True)]


def assert_like_transformers(checkpoint: Checkpoint, text: list[int], logits: torch.Tensor) -> None:
    expected = checkpoint.logits(text[:-1])[-len(logits) :]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    assert text[-len(logits) :] == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("driver", [16, 48, 128], indirect=True)
def test_a_batch_of_16_in_chunks_equals_transformers(checkpoint: Checkpoint, driver: Driver) -> None:
    """Prompts shorter and longer than block, window and chunk; decodes go on past the window."""
    prompts = [prompt(length, length) for length in LENGTHS]
    chunks = [7, 256, 13, 1, 64, 31, 200, 40, 41, 50, 99, 128, 17, 128, 3, 150]
    for text, logits in generate(driver, prompts, chunks, DECODED):
        assert_like_transformers(checkpoint, text, logits)


def test_alone_and_in_a_batch_the_logits_are_bitwise_the_same(checkpoint: Checkpoint, driver: Driver) -> None:
    prompts = [prompt(length, length) for length in LENGTHS]
    whole = [CONTEXT] * len(prompts)
    together = generate(driver, prompts, whole, 3)
    driver.close()
    for tokens, (text, logits) in zip(prompts, together, strict=True):
        [(text_alone, logits_alone)] = generate(driver, [tokens], [CONTEXT], 3)
        driver.close()
        assert text_alone == text
        assert torch.equal(logits_alone, logits)


def test_sequences_that_share_blocks_equal_transformers(checkpoint: Checkpoint, driver: Driver) -> None:
    """As after hits in the prefix cache: spans begin above 0, and several decodes read the same blocks in one step."""
    size = driver.runner.block_size
    first = prompt(2 * size + 5, 1)
    # The blocks are found before a window leaves them: a later hit needs what the window then still holds.
    driver.logits([driver.new(0, first)], [driver.span(0, 2 * size)])
    texts = {0: first}
    new = []
    for key, hit in enumerate([2 * size, 2 * size, size, 2 * size], start=1):
        if hit == size and any(group.window is not None for group in driver.runner.cache_groups):
            hit = 2 * size  # the window of the first block's end has been left
        texts[key] = first[:hit] + prompt(3 * key, key)
        new.append(driver.new(key, texts[key], like=0, shared=hit))
    rows: dict[int, list[torch.Tensor]] = {key: [] for key in texts}
    for _ in range(DECODED):
        logits = driver.logits(new, [driver.span(key) for key in texts])
        new = []
        assert logits is not None
        for key, row in zip(texts, logits, strict=True):
            rows[key].append(row.clone())
            texts[key].append(int(row.argmax()))
    for key, text in texts.items():
        assert_like_transformers(checkpoint, text, torch.stack(rows[key]))


@pytest.mark.parametrize("checkpoint", ["sliding", "mixed"], indirect=True)
def test_a_window_off_by_one_would_be_seen(checkpoint: Checkpoint) -> None:
    """The oracle itself: its logits with a wider and with a narrower window are not these."""
    tokens = prompt(100, 5)
    right = checkpoint.logits(tokens)
    for window in (WINDOW - 1, WINDOW + 1):
        wrong = changed(checkpoint, sliding_window=window).logits(tokens)
        assert torch.equal(wrong[: WINDOW - 1], right[: WINDOW - 1])
        assert float((wrong - right)[WINDOW + 1 :].abs().amax(dim=-1).min()) > 10 * TOLERANCE


@pytest.mark.parametrize("checkpoint", ["gqa", "mixed"], indirect=True)
@pytest.mark.parametrize("block_size", [16, 128])
def test_a_window_with_sinks_over_full_attention(checkpoint: Checkpoint, block_size: int) -> None:
    """Against transformers with the mask written out. Layers with a window of their own keep it."""
    window, sinks = 50, block_size
    config = make_config(checkpoint, block_size, 300, attention_window=window, attention_sinks=sinks)
    driver = Driver(make_runner(config))
    prompts = [prompt(length, length) for length in (20, 60, 190, 300)]
    for text, logits in generate(driver, prompts, [11, 40, 120, 256], DECODED):
        seen = visible(len(text) - 1, window, sinks)
        expected = masked_logits(checkpoint, text[:-1], seen)[-len(logits) :]
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        if len(text) > 200:
            plain = checkpoint.logits(text[:-1])[-len(logits) :]
            assert float((plain - expected).abs().max()) > 100 * TOLERANCE
    driver.close()


def visible(length: int, window: int, sinks: int = 0) -> torch.Tensor:
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    return (key <= query) & ((key > query - window) | (key < sinks))


@torch.inference_mode()
def masked_logits(checkpoint: Checkpoint, tokens: list[int], full: torch.Tensor) -> torch.Tensor:
    """transformers' logits when full-attention layers see what ``full`` ``[tokens, tokens]`` allows."""
    masks = {"full_attention": full[None, None], "sliding_attention": visible(len(tokens), WINDOW)[None, None]}
    # A model with one kind of layer takes its mask alone.
    kinds = set(getattr(checkpoint.model.config, "layer_types", None) or ["full_attention"])
    mask = masks["full_attention"] if kinds == {"full_attention"} else masks
    result: torch.Tensor = checkpoint.model(torch.tensor([tokens]), attention_mask=mask).logits[0]
    return result
