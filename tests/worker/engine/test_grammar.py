"""Grammars: compiled in the background, shared, followed token by token, and never the end of anything else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.worker.grammar_sampling import EOS, VOCAB_SIZE, allowed, compiled, model_path, vocabulary, write
from worker.engine import grammar as grammar_module
from worker.engine.grammar import GrammarFailure, Grammars, check_grammar
from worker.engine.messages import Grammar

DIGITS = Grammar("regex", "[0-9]{1,3}")


def ids_of(text: str) -> list[int]:
    return vocabulary().encode(text)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(model_path(), VOCAB_SIZE, EOS)


def started(grammars: Grammars, request_id: str, grammar: Grammar) -> None:
    grammars.start(request_id, grammar)
    assert compiled(grammars) == {request_id: None}


def test_compiling_happens_beside_the_caller_and_is_told_once() -> None:
    grammars = Grammars(model_path(), VOCAB_SIZE, EOS)
    grammars.start("a", DIGITS)
    grammars.start("b", Grammar("regex", "x+"))
    assert grammars.pending == 2
    assert compiled(grammars) == {"a": None, "b": None}
    assert grammars.pending == 0
    assert grammars.ready() == []


def test_a_bad_grammar_is_told_and_hurts_no_other(grammars: Grammars) -> None:
    grammars.start("bad", Grammar("regex", "["))
    grammars.start("worse", Grammar("json_schema", '{"type": "nonsense"}'))
    grammars.start("text", Grammar("json_schema", "{"))
    grammars.start("token", Grammar("lark", "start: <|no_such_token|>"))
    grammars.start("good", DIGITS)
    told = compiled(grammars)
    assert told["good"] is None
    assert told["bad"] == "The grammar can't be followed: unclosed character class."
    assert "nonsense" in str(told["worse"])
    assert told["text"]
    assert "no_such_token" in str(told["token"])
    assert set(allowed(grammars.masks([(0, "good")]))) == {ids_of(digit)[0] for digit in "0123456789"}


def test_requests_with_one_grammar_share_its_compilation_and_nothing_else(grammars: Grammars) -> None:
    grammar = Grammar("regex", "abc|abd")
    grammars.start("1", grammar)
    grammars.start("2", grammar)
    assert compiled(grammars) == {"1": None, "2": None}
    grammars.start("3", grammar)
    assert grammars.ready() == [("3", None)], "it was compiled already"
    for token_id in ids_of("ab"):
        assert not grammars.accept("1", token_id)
    masks = grammars.masks([(4, "1"), (7, "2"), (9, "3")])
    assert masks is not None
    assert masks.rows == [4, 7, 9]
    assert allowed(masks, 0) == sorted([*ids_of("c"), *ids_of("d")])
    assert allowed(masks, 1) == allowed(masks, 2) != allowed(masks, 0)


def test_the_compiled_are_forgotten_the_longest_unused_first(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "_CACHED_GRAMMARS", 2)
    old, used, new = (Grammar("regex", f"{name}+") for name in ("old", "used", "new"))
    for at, grammar in enumerate([used, old, used, new]):
        started(grammars, f"lru-{at}", grammar)
    grammars.start("again", used)
    assert grammars.ready() == [("again", None)]
    grammars.start("anew", old)
    assert grammars.ready() == []
    assert compiled(grammars) == {"anew": None}


def test_masks_hold_what_may_follow_and_the_ends_only_where_the_output_may_end(grammars: Grammars) -> None:
    started(grammars, "number", DIGITS)
    digits = sorted(ids_of(digit)[0] for digit in "0123456789")
    assert allowed(grammars.masks([(0, "number")])) == digits
    assert not grammars.accept("number", digits[1])
    assert allowed(grammars.masks([(0, "number")])) == sorted([*digits, *EOS])
    assert not grammars.accept("number", digits[2])
    assert grammars.accept("number", digits[3]), "nothing may follow a third digit"


@pytest.mark.parametrize("end", EOS)
def test_each_end_of_sequence_token_completes(grammars: Grammars, end: int) -> None:
    request_id = f"end-{end}"
    started(grammars, request_id, DIGITS)
    assert not grammars.accept(request_id, ids_of("5")[0])
    assert grammars.accept(request_id, end)


def test_special_tokens_are_never_text(grammars: Grammars) -> None:
    special = set(vocabulary().special_tokens.values()) - set(EOS)
    started(grammars, "anything", Grammar("regex", r"(?s:.*)"))
    choices = allowed(grammars.masks([(0, "anything")]))
    assert len(choices) > 49_000
    assert not special & set(choices)
    started(grammars, "spelled", Grammar("regex", re.escape("<|im_start|>")))
    spelled = ids_of("<|im_start|>")
    for token_id in spelled[:-1]:
        assert not special & set(allowed(grammars.masks([(0, "spelled")])))
        assert not grammars.accept("spelled", token_id)
    assert grammars.accept("spelled", spelled[-1])


def test_a_grammar_may_name_special_tokens_itself(grammars: Grammars) -> None:
    started(grammars, "named", Grammar("lark", 'start: <|im_start|> "a" <[4]>'))
    assert allowed(grammars.masks([(0, "named")])) == [vocabulary().special_tokens["<|im_start|>"]]
    assert not grammars.accept("named", 1)
    assert not grammars.accept("named", ids_of("a")[0])
    assert grammars.accept("named", 4)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 20, VOCAB_SIZE - 20])
def test_masks_are_as_wide_as_the_logits_not_as_the_tokenizer(vocab_size: int) -> None:
    grammars = Grammars(model_path(), vocab_size, EOS)
    started(grammars, "a", Grammar("regex", r"(?s:.*)"))
    masks = grammars.masks([(0, "a")])
    assert masks is not None
    assert masks.bits.shape == (1, -(-vocab_size // 32))
    assert masks.bits.dtype == np.int32
    assert 45_000 < len(allowed(masks)) <= min(vocab_size, VOCAB_SIZE)
    assert max(allowed(masks)) < min(vocab_size, VOCAB_SIZE)


def test_no_spans_no_masks(grammars: Grammars) -> None:
    assert grammars.masks([]) is None


def test_masks_stay_while_two_further_steps_are_in_flight(grammars: Grammars) -> None:
    grammars.start("kept", DIGITS)
    grammars.start("other", Grammar("regex", "other"))
    assert compiled(grammars) == {"kept": None, "other": None}
    for _ in range(4):
        first = grammars.masks([(0, "kept")])
        assert first is not None
        kept = first.bits.copy()
        grammars.masks([(0, "other")])
        grammars.masks([(0, "other")])
        assert np.array_equal(first.bits, kept)


def test_a_token_that_the_mask_forbids_ends_the_request(grammars: Grammars) -> None:
    started(grammars, "strayed", DIGITS)
    with pytest.raises(GrammarFailure, match="could not be followed"):
        grammars.accept("strayed", ids_of("a")[0])
    with pytest.raises(GrammarFailure):
        grammars.accept("strayed", ids_of("1")[0])


def test_a_grammar_that_no_token_can_follow_ends_the_request_not_the_engine(grammars: Grammars) -> None:
    """The vocabulary has no token with byte 4."""
    started(grammars, "stuck", Grammar("regex", "a\x04b"))
    assert not grammars.accept("stuck", ids_of("a")[0])
    choices = allowed(grammars.masks([(0, "stuck")]))
    assert set(choices) <= set(EOS)
    with pytest.raises(GrammarFailure):
        grammars.accept("stuck", EOS[0])


def test_dropped_requests_are_forgotten_in_every_state(grammars: Grammars) -> None:
    grammars.drop("never seen")
    grammars.start("compiling", Grammar("regex", "dropped while compiling"))
    grammars.drop("compiling")
    assert grammars.pending == 0
    started(grammars, "following", DIGITS)
    grammars.start("compiled", DIGITS)
    grammars.drop("compiled")
    grammars.drop("following")
    assert compiled(grammars) == {}
    with pytest.raises(KeyError):
        grammars.accept("following", ids_of("1")[0])
    started(grammars, "compiling", DIGITS)
    assert not grammars.accept("compiling", ids_of("1")[0])


def test_a_model_without_an_end_is_told_so() -> None:
    grammars = Grammars(model_path(), VOCAB_SIZE, [])
    grammars.start("a", DIGITS)
    assert "end-of-sequence" in str(compiled(grammars)["a"])


def test_a_file_that_is_gone_is_told_without_its_path() -> None:
    grammars = Grammars("/secret/model.gguf", VOCAB_SIZE, EOS)
    grammars.start("a", DIGITS)
    said = str(compiled(grammars)["a"])
    assert "vocabulary can't be read" in said
    assert "secret" not in said


def test_what_only_the_first_mask_shows_is_told_before_a_step_waits_for_it(grammars: Grammars) -> None:
    grammars.start("a", Grammar("lark", "start: start"))
    assert compiled(grammars)["a"] == "The grammar can't be followed: no text fits it."


SCHEMAS: dict[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "kind": {"enum": ["book", "toy", None, 7, {"a": [1]}]},
            "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "maker": {
                "type": "object",
                "properties": {"year": {"type": "integer", "minimum": 1900, "maximum": 2030}, "x": {"type": "null"}},
                "required": ["year"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "kind", "sku", "tags", "maker"],
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "numbers": {
        "type": "array",
        "prefixItems": [
            {"type": "integer", "minimum": -5, "maximum": 5},
            {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
            {"type": "integer", "exclusiveMinimum": 10, "multipleOf": 5, "maximum": 100},
        ],
        "minItems": 3,
        "items": False,
    },
    "optional": {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("a", "b", "é", 'q"')},
        "additionalProperties": False,
    },
    "map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"], "additionalProperties": False},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"], "additionalProperties": False},
        ]
    },
    "formats": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "on": {"type": "string", "format": "date"},
            "at": {"type": "string", "format": "ipv4"},
        },
        "required": ["id", "on", "at"],
        "additionalProperties": False,
    },
    "unicode": {"enum": ["naïve", "日本語", "😀", 'quote " and \\ slash', "line\nbreak"]},
}
"""Each bounded, or likely to end."""
_COMPACT = {"whitespace_flexible": False}


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_model_draws_fits_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    grammar = Grammar("json_schema", json.dumps({**schema, "x-guidance": _COMPACT}))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended, outputs = 0, set()
    for seed in range(12):
        text, complete = write(grammar, seed)
        if complete:
            validator.validate(json.loads(text))
            outputs.add(text)
            ended += 1
    assert ended >= 10
    assert len(outputs) > 1, "the draws must differ, or the test says nothing"


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{3}-[a-z]{2,4}", r"(yes|no)( please)?", r"^\p{Lu}\p{Ll}{1,5}$", r"é{2,3}|😀x"]
)
def test_whatever_a_model_draws_matches_the_expression(pattern: str) -> None:
    spelled = pattern.replace(r"\p{Lu}", "[^\\W\\d_]").replace(r"\p{Ll}", "[^\\W\\d_]")
    for seed in range(6):
        text, complete = write(Grammar("regex", pattern), seed)
        assert complete
        assert re.fullmatch(spelled, text), text


def test_check_tells_what_is_wrong_without_a_model() -> None:
    assert check_grammar(DIGITS) is None
    assert check_grammar(Grammar("json_schema", '{"type": "object"}')) is None
    assert "uniqueItems" in str(check_grammar(Grammar("json_schema", '{"type": "array", "uniqueItems": true}')))
    assert "look-around" in str(check_grammar(Grammar("regex", "(?=a)b")))
    assert "start" in str(check_grammar(Grammar("lark", 'rule: "a"')))
    for fault in (Grammar("regex", "(" * 30_000), Grammar("lark", "start: " + '"a" ~ ' * 500)):
        message = check_grammar(fault)
        assert message
        assert len(message) <= 300
        assert "\n" not in message


@pytest.mark.parametrize(
    "make",
    [
        """Grammar("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": {"a2000": {"type": "string"}, **{
            f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(2000)}}}))""",
        """Grammar("lark", "start: a0\\n" + "\\n".join(f"a{i}: a{i + 1}" for i in range(10000)) + '\\na10000: "x"')""",
    ],
    ids=["references", "rules"],
)
def test_a_long_chain_of_references_does_not_end_the_process(make: str) -> None:
    """On a stack of common size it does: the library recurses once for each link."""
    probe = (
        "import json\nfrom worker.engine.grammar import check_grammar\nfrom worker.engine.messages import Grammar\n"
        f"print(check_grammar({make}))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "None"), done.stderr
