"""Which layers share a block table, and how their pages are laid out. Pure: no tensors.

All groups draw blocks from one pool, so their pages are equally large: room for the keys and values of
``CacheLayout.layers_per_page`` layers. Layers that see alike (same window, same sinks) form a class; a class is one
group, or several of the size of a smaller class if less of the pages stays empty that way. (With five sliding layers
for each full one, groups of one size waste nothing; one group a class would leave most of a full layer's page empty.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from worker.engine.plan import CacheGroup
from worker.model.config import DecoderConfig

MOST_GROUPS: Final = 8
"""Each group costs a step its own block tables and its own attention plan."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups, and the layers of each in the order in which they stand in a page."""

    groups: tuple[CacheGroup, ...]
    layers: tuple[tuple[int, ...], ...]

    @property
    def layers_per_page(self) -> int:
        """Layers that a page has room for: those of the largest group."""
        return max(len(layers) for layers in self.layers)

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each layer its group and its index in a page of that group."""
        found = {
            layer: (group, index) for group, layers in enumerate(self.layers) for index, layer in enumerate(layers)
        }
        return [found[layer] for layer in range(len(found))]


def cache_layout(
    config: DecoderConfig, attention_window: int | None = None, attention_sinks: int = 0, block_size: int | None = None
) -> CacheLayout:
    """The layout for a model's layers.

    With ``attention_window``, layers with full attention see the last so many tokens and the first
    ``attention_sinks`` only (Xiao et al., 2024; positions stay what they are in the text). Layers with a window of
    their own keep it. Raises ``ValueError`` for sizes that can't be; ``block_size``, if given, must divide the sinks.
    """
    if attention_window is None:
        if attention_sinks:
            raise ValueError("attention_sinks needs attention_window: without it every token is visible")
    elif attention_window < 1:
        raise ValueError(f"attention_window is {attention_window}; it must be at least 1")
    if attention_sinks < 0 or (block_size is not None and attention_sinks % block_size):
        of = "" if block_size is None else f" of {block_size} tokens"
        raise ValueError(f"attention_sinks is {attention_sinks}; it must be a whole number of blocks{of}")
    narrowed = CacheGroup(attention_window, attention_sinks)
    classes: dict[CacheGroup, list[int]] = {}
    for layer, window in enumerate(config.windows):
        classes.setdefault(narrowed if window is None else CacheGroup(window), []).append(layer)
    size = _layers_per_group([len(layers) for layers in classes.values()])
    groups, members = [], []
    for group, layers in classes.items():
        for begin in range(0, len(layers), size):
            groups.append(group)
            members.append(tuple(layers[begin : begin + size]))
    return CacheLayout(tuple(groups), tuple(members))


def cache_groups(
    config: DecoderConfig, attention_window: int | None = None, attention_sinks: int = 0
) -> list[CacheGroup]:
    """The groups of ``cache_layout``: what the KV bookkeeping needs to know."""
    return list(cache_layout(config, attention_window, attention_sinks).groups)


def _layers_per_group(class_sizes: Sequence[int]) -> int:
    """The size of a class that leaves the least room empty when all groups have it; of equals, the one for fewer."""

    def cost(size: int) -> tuple[int, int]:
        groups = sum(-(-layers // size) for layers in class_sizes)
        return groups * size - sum(class_sizes), groups

    largest = max(class_sizes)
    few = [size for size in set(class_sizes) if size == largest or cost(size)[1] <= MOST_GROUPS]
    return min(few, key=cost)
