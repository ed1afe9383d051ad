"""Names of KV blocks: a chain of SHA-256 over token ids, the same in every process, tier, event and index.

A block's name stands for all that decides what its keys and values are: the model and its weights, the adapter, the
block size, the tenant's salt, and every token up to the block's end. So equal names mean equal content, and what the
gateway names from a prompt's tokens is what a worker holds. Which cache group a block belongs to is not in its name:
it is part of the key beside it wherever a block is looked up.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from array import array
from collections.abc import Sequence

NAME_BYTES = 32
_ID_BYTES = 4
_VERSION = b"penstock block name 1"


class BlockNamer:
    """Names the blocks of one model. Cheap to make; holds nothing of the prompts it names."""

    def __init__(self, fingerprint: str, block_size: int, adapter: str = "") -> None:
        """``fingerprint`` stands for architecture and weights; ``block_size`` is in tokens; ``adapter`` is empty for
        the bare model. Raises ValueError when ``block_size`` is not positive."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; a block has at least 1 token")
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.adapter = adapter
        self._salt_key = hashlib.sha256(_VERSION + b" salt key " + fingerprint.encode()).digest()

    def root(self, salt: str = "") -> bytes:
        """The parent of a sequence's first block. Sequences without a salt share; a salt can't be read from it."""
        keyed = hmac.digest(self._salt_key, salt.encode(), "sha256") if salt else b""
        parts = (_VERSION, self.fingerprint.encode(), self.adapter.encode(), b"%d" % self.block_size, keyed)
        # Each part goes behind its length, or else what moves from one part to the next would name the same.
        return hashlib.sha256(b"".join(b"%d:%s" % (len(part), part) for part in parts)).digest()

    def next(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The name of the block of these ``block_size`` tokens that follows ``parent``, a name or a root.

        Raises ValueError for another number of tokens, OverflowError for an id outside 0 to 2**32 - 1.
        """
        if len(token_ids) != self.block_size:
            raise ValueError(f"a block has {self.block_size} tokens, not {len(token_ids)}: parts of one have no name")
        return self.chain(parent, token_ids)[0]

    def chain(self, parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """The names of the full blocks that ``token_ids`` make after ``parent``; a rest that fills none is left out.

        Raises OverflowError for an id outside 0 to 2**32 - 1.
        """
        packed = array("I", token_ids)
        assert packed.itemsize == _ID_BYTES
        if sys.byteorder == "big":
            packed.byteswap()
        data = packed.tobytes()
        size = self.block_size * _ID_BYTES
        sha256 = hashlib.sha256
        names = []
        for start in range(0, len(data) - size + 1, size):
            parent = sha256(parent + data[start : start + size]).digest()
            names.append(parent)
        return names
