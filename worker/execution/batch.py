"""From a plan to the arrays of one varlen batch, with the sequences' tokens and block tables held between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from worker.engine.plan import NULL_BLOCK, NewSequence, StepPlan
from worker.execution.sampled_row import SampledRow, SequenceSampling

_INITIAL_ROWS: Final = 16


@dataclass(slots=True)
class HeldSequence:
    """A sequence that the runner holds; ``row``: of ``SequenceTable.token_ids``."""

    key: int
    row: int
    num_blocks: list[int]
    """Length of its block table in each cache group: those with a window may get their blocks later."""
    drawing: SequenceSampling


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's arrays. ``tokens`` counts new tokens over all sequences.

    Host (numpy): ``query_start`` int32 ``[sequences + 1]``, ``seq_lens`` int32 ``[sequences]`` (new tokens included),
    ``block_tables``: for each cache group int32 ``[sequences, most blocks]``. On the device: ``token_ids`` int32 and
    ``positions`` int64, each ``[tokens]``; ``slots``: for each cache group int64 ``[tokens]`` (block id * block size +
    offset).
    ``sampled``: the last token of each span that draws, as indices into the batch, with the sequence, the row, the
    position of the token to be drawn, and all that the draw depends on.
    """

    query_start: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: list[npt.NDArray[np.int32]]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: list[torch.Tensor]
    sampled: torch.Tensor
    sampled_sequences: list[HeldSequence]
    sampled_rows: list[int]
    sampled_positions: list[int]
    draws: list[SampledRow]


class SequenceTable:
    """Tokens (on the device) and block tables (on the host, one for each cache group) of the sequences that the runner
    holds, a row each. ``token_ids`` int32 ``[rows, max_model_len + 1]``."""

    def __init__(self, max_model_len: int, block_size: int, device: torch.device, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._device = device
        # One past the longest: the draw of a sequence's last token has a place, though nothing reads it.
        self._width = max_model_len + 1
        self._max_blocks = -(-self._width // block_size)
        self._sequences: dict[int, HeldSequence] = {}
        self._free: list[int] = []
        self.token_ids = torch.zeros(0, self._width, dtype=torch.int32, device=device)
        self._block_tables = np.zeros((num_groups, 0, self._max_blocks), np.int32)
        self._grow(_INITIAL_ROWS)

    def __len__(self) -> int:
        return len(self._sequences)

    def _grow(self, rows: int) -> None:
        before = self.token_ids.shape[0]
        more = torch.zeros(rows, self._width, dtype=torch.int32, device=self._device)
        self.token_ids = torch.cat((self.token_ids, more))
        self._block_tables = np.pad(self._block_tables, ((0, 0), (0, rows), (0, 0)), constant_values=NULL_BLOCK)
        self._free.extend(range(before + rows - 1, before - 1, -1))

    def _add(self, new: NewSequence) -> None:
        if new.key in self._sequences:
            raise ValueError(f"sequence {new.key} is already held")
        count = len(new.token_ids)
        if count > self._width:
            raise ValueError(f"sequence {new.key} has {count} tokens, more than the {self._width - 1} allowed")
        if not self._free:
            self._grow(self.token_ids.shape[0])
        row = self._free.pop()
        self.token_ids[row, :count] = torch.tensor(new.token_ids, dtype=torch.int32)
        self._sequences[new.key] = HeldSequence(
            new.key, row, [0] * len(self._block_tables), SequenceSampling(new.sampling, new.num_prompt)
        )

    def forget(self, key: int) -> None:
        """Give up a sequence's row. An unknown key is no fault: a sequence may end before its first step came here."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            self._block_tables[:, sequence.row, : max(sequence.num_blocks)] = NULL_BLOCK
            self._free.append(sequence.row)

    def prepare(self, plan: StepPlan) -> Batch:
        """Apply what the plan says of sequences and blocks, and lay out its spans. Raises ``ValueError`` for a plan
        that names unknown sequences or lacks blocks: a fault of the scheduler."""
        for key in plan.retired:
            self.forget(key)
        for new in plan.new:
            self._add(new)

        spans = plan.spans
        rows = np.empty(len(spans), np.int64)
        sequences = []
        for index, span in enumerate(spans):
            sequence = self._sequences.get(span.key)
            if sequence is None:
                raise ValueError(f"sequence {span.key} is not held")
            rows[index] = sequence.row
            sequences.append(sequence)
            if span.new_block_ids:
                self._extend(sequence, span.new_block_ids)
            if span.start + span.count > min(sequence.num_blocks) * self._block_size:
                raise ValueError(f"sequence {span.key} has too few blocks for token {span.start + span.count - 1}")

        starts = np.array([span.start for span in spans], np.int64)
        counts = np.array([span.count for span in spans], np.int64)
        query_start = np.zeros(len(spans) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        tokens = int(query_start[-1])
        owner = np.repeat(np.arange(len(spans)), counts)
        positions = np.arange(tokens) + (starts - query_start[:-1])[owner]
        seq_lens = (starts + counts).astype(np.int32)
        most_blocks = -(-int(seq_lens.max()) // self._block_size)
        block_tables = [tables[rows, :most_blocks] for tables in self._block_tables]
        columns, offsets = np.divmod(positions, self._block_size)
        slots = [tables[owner, columns].astype(np.int64) * self._block_size + offsets for tables in block_tables]
        token_index = torch.from_numpy(rows[owner] * self._width + positions).to(self._device)
        drawn = [index for index, span in enumerate(spans) if span.sample]
        return Batch(
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=block_tables,
            token_ids=self.token_ids.view(-1).index_select(0, token_index),
            positions=torch.from_numpy(positions).to(self._device),
            slots=[torch.from_numpy(of_group).to(self._device) for of_group in slots],
            sampled=torch.from_numpy(query_start[1:][drawn].astype(np.int64) - 1).to(self._device),
            sampled_sequences=[sequences[index] for index in drawn],
            sampled_rows=rows[drawn].tolist(),
            sampled_positions=seq_lens[drawn].tolist(),
            draws=[SampledRow(sequences[index].drawing, int(seq_lens[index]), sequences[index].row) for index in drawn],
        )

    def _extend(self, sequence: HeldSequence, block_ids: list[list[int]]) -> None:
        if len(block_ids) != len(self._block_tables):
            raise ValueError(
                f"sequence {sequence.key} is given blocks of {len(block_ids)} cache groups; there are "
                f"{len(self._block_tables)}"
            )
        for group, ids in enumerate(block_ids):
            begin = sequence.num_blocks[group]
            sequence.num_blocks[group] = end = begin + len(ids)
            self._block_tables[group, sequence.row, begin:end] = ids

    def append(self, rows: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> None:
        """Write drawn tokens (``[n]``, on the device) to their rows, without a copy to the host."""
        at_rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        at_positions = torch.tensor(positions, dtype=torch.int64, device=self._device)
        self.token_ids[at_rows, at_positions] = tokens.to(torch.int32)
