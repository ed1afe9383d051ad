"""Block names: what goes into one, what does not, and that every process finds the same."""

import hashlib
import itertools
import os
import random
import struct
import subprocess
import sys

import pytest

from worker.protocol.block_names import NAME_BYTES, BlockNamer

TOKENS = [5, 0, 2**32 - 1, 7, 11, 12, 13, 14]


def test_a_name_is_the_hash_of_its_parent_and_its_tokens_in_little_endian() -> None:
    namer = BlockNamer("f00d", 4)
    root = namer.root()
    first = hashlib.sha256(root + struct.pack("<4I", *TOKENS[:4])).digest()
    second = hashlib.sha256(first + struct.pack("<4I", *TOKENS[4:])).digest()
    assert namer.next(root, TOKENS[:4]) == first
    assert namer.next(first, TOKENS[4:]) == second
    assert namer.chain(root, TOKENS) == [first, second]
    assert len(root) == len(first) == NAME_BYTES


def test_every_process_gives_the_same_names() -> None:
    probe = (
        "from worker.protocol.block_names import BlockNamer\n"
        f"n = BlockNamer('f00d', 4, 'lora'); print(n.chain(n.root('acme'), {TOKENS})[-1].hex())"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", probe],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    namer = BlockNamer("f00d", 4, "lora")
    assert names == {namer.chain(namer.root("acme"), TOKENS)[-1].hex()}


def test_all_that_decides_the_content_decides_the_name() -> None:
    namers = [
        BlockNamer("a", 4),
        BlockNamer("b", 4),
        BlockNamer("a", 2),
        BlockNamer("a", 4, "lora"),
        BlockNamer("a", 4, "other"),
        # Fields that run together when written one after the other.
        BlockNamer("alora", 4),
        BlockNamer("al", 4, "ora"),
    ]
    salts = ["", "acme", "globex", "acme ", "0"]
    roots = [namer.root(salt) for namer, salt in itertools.product(namers, salts)]
    assert len(set(roots)) == len(roots)


def test_a_later_block_depends_on_all_tokens_before_it() -> None:
    namer = BlockNamer("a", 2)
    plain = namer.chain(namer.root(), [1, 2, 3, 4, 5, 6])
    changed = namer.chain(namer.root(), [9, 2, 3, 4, 5, 6])
    assert not set(plain) & set(changed)
    assert namer.chain(namer.root(), [1, 2, 3, 4, 9, 6])[:2] == plain[:2]


def test_the_salt_goes_in_behind_a_key_of_the_model() -> None:
    namer = BlockNamer("a", 4)
    fields = [b"penstock block name 1", b"a", b"", b"4", hashlib.sha256(b"acme").digest()]
    unkeyed = hashlib.sha256(b"".join(b"%d:%s" % (len(field), field) for field in fields)).digest()
    assert namer.root("acme") != unkeyed


def test_a_part_of_a_block_has_no_name() -> None:
    namer = BlockNamer("a", 4)
    assert namer.chain(namer.root(), [1, 2, 3]) == []
    assert len(namer.chain(namer.root(), [1, 2, 3, 4, 5])) == 1
    for count in (0, 3, 5, 8):
        with pytest.raises(ValueError, match="a block has 4 tokens"):
            namer.next(namer.root(), [1] * count)


def test_naming_in_pieces_and_at_once_is_the_same() -> None:
    rng = random.Random(1)
    namer = BlockNamer("a", 16)
    tokens = [rng.randrange(200_000) for _ in range(16 * 40 + 5)]
    whole = namer.chain(namer.root("s"), tokens)
    parent, pieces = namer.root("s"), []
    for start in range(0, 16 * 40, 16):
        parent = namer.next(parent, tokens[start : start + 16])
        pieces.append(parent)
    assert whole == pieces


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_a_token_id_that_can_not_be_one_is_refused(bad: int) -> None:
    namer = BlockNamer("a", 2)
    with pytest.raises(OverflowError):
        namer.next(namer.root(), [1, bad])


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        BlockNamer("a", 0)
