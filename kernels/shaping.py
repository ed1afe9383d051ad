"""Changing logits before a draw: bans, bias and penalties, in place, on chosen rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kernels.slices import row_slices

_COUNTED_ROWS: Final = 64
"""Most rows whose tokens are counted at a time: a counter for each token of the vocabulary and row."""


def allow(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Ban every token whose bit is not set.

    ``logits`` fp32 ``[n, vocab]``; ``rows`` int64 ``[m]``, no row twice; ``bits`` int32 ``[m, words]``, little-endian:
    bit ``t % 32`` of word ``t // 32`` is token ``t``. Bits beyond ``vocab`` mean nothing; tokens beyond the bits are
    banned.
    """
    vocab = logits.shape[1]
    covered = min(vocab, bits.shape[1] * 32)
    # What each byte of bits leaves of eight logits: everything or nothing, to be met with ``minimum``.
    bytes_, places = torch.arange(256, device=bits.device), torch.arange(8, device=bits.device)
    ceilings = torch.where((bytes_.unsqueeze(1) >> places) & 1 == 1, torch.inf, -torch.inf)
    for some in row_slices(logits[: len(rows)]):
        at = rows[some]
        ceiling = ceilings.index_select(0, bits[some].view(torch.uint8).view(-1).to(torch.int32)).view(len(at), -1)
        chosen = logits.index_select(0, at)
        torch.minimum(chosen[:, :covered], ceiling[:, :covered], out=chosen[:, :covered])
        chosen[:, covered:] = -torch.inf
        logits.index_copy_(0, at, chosen)


def ban(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Ban token ``token_ids[i]`` in row ``rows[i]``; both int64 ``[m]``. ``logits`` ``[n, vocab]``."""
    logits[rows, token_ids] = -torch.inf


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor) -> None:
    """Add ``bias[i]`` to token ``token_ids[i]`` in row ``rows[i]``; int64 ``[m]`` and fp32 ``[m]``, no pair twice."""
    logits[rows, token_ids] += bias


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Rows of logits to be penalised, on the host; all ``[m]``, no row twice.

    Sequence ``held_rows[i]`` draws from row ``rows[i]``. It holds ``lengths[i]`` tokens, of which the first
    ``prompts[i]`` are prompt. A token of prompt or output has its logit divided by ``repetition`` if above 0, else
    multiplied by it (Keskar et al., 2019); then a token of the output loses ``frequency`` for each time it stands
    there, and ``presence`` once.
    """

    rows: npt.NDArray[np.int64]
    held_rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]

    def take(self, some: slice) -> PenalisedRows:
        return PenalisedRows(
            self.rows[some],
            self.held_rows[some],
            self.lengths[some],
            self.prompts[some],
            self.repetition[some],
            self.presence[some],
            self.frequency[some],
        )


class Penalties:
    """Penalties for the tokens that a sequence already holds.

    Counted anew in each step from the sequences' own tokens on the device: right after preemption, and with a token
    that the host has not seen, and no state to keep. Costs a few operations for each token held, far less than
    attention over it; nothing depends on the vocabulary's size but the memory of the counts, which is kept and always
    zero between calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(0, dtype=torch.int32, device=device)

    def apply(self, logits: torch.Tensor, held: torch.Tensor, penalised: PenalisedRows) -> None:
        """Change ``logits`` (fp32 ``[n, vocab]``, contiguous); ``held`` int32 ``[sequences, longest]``: all tokens."""
        for begin in range(0, len(penalised.rows), _COUNTED_ROWS):
            self._apply(logits, held, penalised.take(slice(begin, begin + _COUNTED_ROWS)))

    def _apply(self, logits: torch.Tensor, held: torch.Tensor, penalised: PenalisedRows) -> None:
        device, vocab, total = logits.device, logits.shape[1], int(penalised.lengths.sum())

        def on_device(values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
            return torch.from_numpy(values).to(device)

        owner = torch.repeat_interleave(on_device(penalised.lengths), output_size=total)
        place = torch.arange(total, device=device) - on_device(np.cumsum(penalised.lengths) - penalised.lengths)[owner]
        tokens = held[on_device(penalised.held_rows)[owner], place].to(torch.int64)
        at = on_device(penalised.rows)[owner] * vocab + tokens
        flat = logits.view(-1)
        values, factor = flat[at], on_device(penalised.repetition)[owner]
        values = torch.where(values > 0, values / factor, values * factor)
        if penalised.presence.any() or penalised.frequency.any():
            output = place >= on_device(penalised.prompts)[owner]
            counts = self._count(owner * vocab + tokens, output, len(penalised.rows) * vocab)
            values = values - on_device(penalised.frequency)[owner] * counts
            values = values - on_device(penalised.presence)[owner] * (counts > 0)
        # A token that stands several times writes the same value as often.
        flat[at] = values

    def _count(self, at: torch.Tensor, counted: torch.Tensor, size: int) -> torch.Tensor:
        """How often each element's place occurs among the ``counted`` ones; int32, the shape of ``at``."""
        if len(self._counts) < size:
            self._counts = torch.zeros(size, dtype=torch.int32, device=at.device)
        self._counts.scatter_add_(0, at, counted.to(torch.int32))
        counts = self._counts[at]
        self._counts.index_fill_(0, at, 0)
        return counts
