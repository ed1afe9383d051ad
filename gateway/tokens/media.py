"""The most tokens that one image can be in a prompt, by model.

Source: https://platform.openai.com/docs/guides/images-vision#calculating-costs. An image is scaled to fit, so that no
more than eight tiles of 512 pixels, or 1,536 patches, are left of it.
"""

from __future__ import annotations

from typing import Final

_TILES: Final = 8
_PATCHES: Final = 1536


def _tiles(base: int, each: int) -> tuple[int, int]:
    return base, base + _TILES * each


def _patches(percent: int) -> tuple[int, int]:
    most = -(-_PATCHES * percent // 100)
    return most, most


_MODELS: Final[tuple[tuple[str, tuple[int, int]], ...]] = (
    # The longer of two names that begin alike stands first.
    ("gpt-4.1-mini", _patches(162)),
    ("gpt-4.1-nano", _patches(246)),
    ("gpt-4.1", _tiles(85, 170)),
    ("gpt-4o-mini", _tiles(2833, 5667)),
    ("gpt-4o", _tiles(85, 170)),
    ("gpt-4.5", _tiles(85, 170)),
    ("gpt-4-turbo", _tiles(85, 170)),
    ("gpt-5-mini", _patches(162)),
    ("gpt-5-nano", _patches(246)),
    ("gpt-5", _tiles(70, 140)),
    ("o4-mini", _patches(172)),
    ("o3", _tiles(75, 150)),
    ("o1", _tiles(75, 150)),
)
_UNKNOWN: Final = _tiles(2833, 5667)
"""The dearest of those that are known."""


def image_tokens(model: str, *, low: bool = False) -> int:
    """``model``: as its backend calls it. ``low``: the image is asked for at low detail."""
    cheap, most = next((found for prefix, found in _MODELS if model.startswith(prefix)), _UNKNOWN)
    return cheap if low else most
