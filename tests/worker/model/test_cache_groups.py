from __future__ import annotations

import pytest

from worker.engine.plan import CacheGroup
from worker.model.cache_groups import MOST_GROUPS, cache_groups, cache_layout
from worker.model.config import DecoderConfig

FULL = CacheGroup()


def config(*windows: int | None) -> DecoderConfig:
    return DecoderConfig(
        architecture="llama",
        num_layers=len(windows),
        hidden_size=64,
        mlp_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        context_length=512,
        rope_base=10_000.0,
        norm_epsilon=1e-5,
        eos_token_ids=(),
        windows=windows,
    )


def test_layers_that_see_alike_are_one_group() -> None:
    layout = cache_layout(config(None, None, None))
    assert layout.groups == (FULL,)
    assert layout.layers == ((0, 1, 2),)
    assert layout.layers_per_page == 3
    assert layout.places == [(0, 0), (0, 1), (0, 2)]
    assert cache_groups(config(32, 32)) == [CacheGroup(32)]


def test_classes_of_one_size_are_a_group_each() -> None:
    layout = cache_layout(config(32, None, 32, None))
    assert layout.groups == (CacheGroup(32), FULL)
    assert layout.layers == ((0, 2), (1, 3))
    assert layout.places == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_big_class_is_split_where_pages_would_stay_empty() -> None:
    """Two full layers and ten with a window: six groups of two, all pages full."""
    windows = [None if layer % 6 == 5 else 32 for layer in range(12)]
    layout = cache_layout(config(*windows))
    assert layout.groups == (*[CacheGroup(32)] * 5, FULL)
    assert layout.layers_per_page == 2
    assert layout.layers[:2] == ((0, 1), (2, 3))
    assert layout.layers[-1] == (5, 11)
    for layer, (group, index) in enumerate(layout.places):
        assert layout.layers[group][index] == layer


def test_padding_is_taken_where_it_is_less_than_what_splitting_leaves() -> None:
    # 5 and 4 layers: two groups of 5 leave one place empty, three groups of 4 leave three.
    layout = cache_layout(config(*[None] * 5, *[32] * 4))
    assert layout.layers_per_page == 5
    assert [len(layers) for layers in layout.layers] == [5, 4]


def test_the_number_of_groups_is_bounded() -> None:
    """One layer with a window beside thirty: groups of one would waste nothing, and cost a plan each."""
    layout = cache_layout(config(*[None] * 30, 32))
    assert [len(layers) for layers in layout.layers] == [30, 1]
    for windows in ([None] * 30 + [32, 64], [None] * 16 + [32] * 2):
        assert len(cache_layout(config(*windows)).groups) <= MOST_GROUPS


def test_a_window_may_be_laid_over_full_layers() -> None:
    assert cache_groups(config(None, None), 128, 32) == [CacheGroup(128, 32)]
    assert cache_groups(config(32, None), 128, 32) == [CacheGroup(32), CacheGroup(128, 32)]
    assert cache_groups(config(32, None), 32) == [CacheGroup(32)]
    assert cache_layout(config(None), 128, 32, block_size=16).groups == (CacheGroup(128, 32),)


def test_sizes_that_can_not_be_are_refused() -> None:
    with pytest.raises(ValueError, match="attention_sinks needs attention_window"):
        cache_layout(config(None), None, 16)
    with pytest.raises(ValueError, match="attention_window is 0"):
        cache_layout(config(None), 0)
    for sinks, block in ((-16, None), (24, 16), (16, 128)):
        with pytest.raises(ValueError, match=f"attention_sinks is {sinks}; it must be a whole number of blocks"):
            cache_layout(config(None), 64, sinks, block)
    with pytest.raises(ValueError, match="below 1"):
        config(0)
