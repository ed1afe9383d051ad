"""The tokenizer makes the very ids that ``tokenizers`` makes, and no special id out of plain text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from worker.server.tokenizer import Tokenizer, UnsupportedTokenizer, UntokenizableText

WILD = [
    "The capital of France is Paris.",
    "it's we'll THEY'RE don't I'M",
    "  two spaces\n\n\n  and lines\r\n\ttabs \u00a0 no-break \u3000 ideographic",
    "1234567890 3.14159 ½ Ⅷ ١٢٣ ①②",
    "   42 and \n 7",
    "日本語のテキスト 中文文本 한국어 텍스트",
    "العربية हिन्दी ไทย עברית ქართული",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 😀😀😀",
    "e\u0301 a\u0308\u0323 \u1100\u1161\u11a8 \u200b\u200d\ufeff\ufffd",
    "def f(x):\n    return x ** 2  # comment\n",
    "https://example.com/a?b=c&d=%20#e",
    "<|im_end|> <|im_start|>user <repo_name>",
    "a\x00b\x04c \x1d!\x04! \x06\x13\x14\x16",
    "\U00040000\U000bffff\U000f0000\U0010ffff ca\U00032419\U0002f7ec",
    "!" * 300 + "a" * 300 + " " * 300 + "x",
    "",
    " ",
    "\n",
]


@pytest.mark.parametrize("text", WILD, ids=range(len(WILD)))
def test_ids_equal_the_references(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast, text: str) -> None:
    expected = reference.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, allow_special=True) == expected


def test_ids_equal_the_references_on_random_text(tokenizer: Tokenizer, reference: PreTrainedTokenizerFast) -> None:
    draw = random.Random(20261129)
    alphabet = [chr(code) for code in range(0x250)] + list(
        "日本語中文한국어العربيةहिन्दी😀\u200d\u0301\u1100\u3000\u00a0"
    )
    alphabet += (
        [" "] * 60 + ["\n"] * 20 + list("0123456789") * 3 + ["'s", "'ll", " the", "<|im_end|>", "\U00040000"] * 4
    )
    planes = [*range(0xD800), *range(0xE000, 0x110000)]
    texts = ["".join(draw.choices(alphabet, k=draw.randrange(40))) for _ in range(6000)]
    texts += ["".join(chr(draw.choice(planes)) + draw.choice(["", " ", "a"]) for _ in range(20)) for _ in range(2000)]
    expected = [found.ids for found in reference.backend_tokenizer.encode_batch(texts, add_special_tokens=False)]
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, allow_special=True) == ids, ascii(text)


def test_ids_equal_the_references_on_every_word_of_the_vocabulary(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerFast
) -> None:
    words = [tokenizer.decode_bytes([at]).decode(errors="ignore") for at in range(tokenizer.vocab_size)]
    expected = [found.ids for found in reference.backend_tokenizer.encode_batch(words, add_special_tokens=False)]
    assert [tokenizer.encode(word) for word in words] == expected


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    # The vocabulary lacks these bytes: the reference drops them, and so do we.
    dropped = {*b"\x04\x06\x13\x14\x16\x1d", 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
    expected = bytes(byte for byte in text.encode() if byte not in dropped)
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == expected
    assert not set(ids) & set(tokenizer.special_tokens.values())


def test_a_special_token_comes_only_where_it_is_allowed(tokenizer: Tokenizer) -> None:
    for text, special in tokenizer.special_tokens.items():
        assert special not in tokenizer.encode(f"a{text}b")
        assert tokenizer.decode_bytes(tokenizer.encode(f"a{text}b")).decode() == f"a{text}b"
        assert tokenizer.encode(f"a{text}b", allow_special=True)[1] == special
    assert tokenizer.decode_bytes([2, *tokenizer.encode("x"), 1]) == b"x"


def test_text_that_would_overflow_the_splitter_is_refused(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(" " * 499_999 + "a")) > 1
    with pytest.raises(UntokenizableText, match="white-space"):
        tokenizer.encode(" " * 1_500_000 + "a")


def test_what_can_not_be_reproduced_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedTokenizer, match="'llama' is not supported"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.model": "llama"})
    with pytest.raises(UnsupportedTokenizer, match="'qwen2' is not supported"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"})
    swapped = list(metadata["tokenizer.ggml.merges"])
    swapped[10], swapped[20] = swapped[20], swapped[10]
    with pytest.raises(UnsupportedTokenizer, match="out of the order"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.merges": swapped})
