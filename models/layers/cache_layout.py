"""Assigns layers to block tables, and each layer's keys and values to a place in the cache's memory.

Layers that keep the same part of a sequence (all of it, or a window) form cache groups with equal numbers of layers.
A block has therefore the same size in every group, and one pool of pages serves all groups, for any mix of long and
short sequences. Layers of different groups share one place of a page, since a page belongs to one group at a time.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig

NEARLY_EQUAL = 1.5
"""Kinds whose numbers of layers differ by less get one group each, the smaller one with places that stay empty."""


class View(msgspec.Struct, frozen=True):
    """The part of a cache group's sequence that some of its layers see."""

    group: int
    window: int | None
    """The number of keys that a token sees, itself included; None is all."""


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes are per layer where they are named `..._of`."""

    windows: tuple[int | None, ...]
    """Per group, which positions its blocks are kept for; None is all."""
    group_layers: tuple[int, ...]
    """Per group, how many layers it has."""
    views: tuple[View, ...]
    view_of: tuple[int, ...]
    """Index into `views`."""
    slot_of: tuple[int, ...]
    """Place within a page."""
    num_slots: int
    """Places of a page: the layers of the largest group."""


def with_cache_groups(config: DecoderConfig, longest: int, *, hybrid: bool) -> DecoderConfig:
    """The same model, whose layers with a window have cache groups of their own.

    Args:
        longest: positions of a sequence; a window that none outgrows is none, and queries that grow for none do not.
        hybrid: False keeps all layers in one group, which keeps every position.
    """
    windows = tuple(None if window is None or window >= longest else window for window in config.windows)
    growth = config.query_growth
    if growth is not None and growth.original >= longest:
        growth = None
    return msgspec.structs.replace(config, hybrid_cache=hybrid, query_growth=growth).with_layers(window=windows)


@lru_cache(16)
def cache_layout(config: DecoderConfig) -> CacheLayout:
    """The groups of a model's layers. One, unless layers differ in their windows and `hybrid_cache` is on. Layers that
    have states instead of keys and values are in none: they have the first view and slot, and use neither.
    """
    attending = [layer for layer, shape in enumerate(config.layers) if shape.mixer == "attention"]
    windows = [config.layers[layer].window for layer in attending]
    kinds = list(dict.fromkeys(windows)) if config.hybrid_cache else []
    if len(kinds) < 2:
        return _one_group(windows, kinds[0] if kinds else None, attending, config.num_layers)
    counts = [windows.count(kind) for kind in kinds]
    size = max(counts) if max(counts) < NEARLY_EQUAL * min(counts) else min(counts)
    group_windows: list[int | None] = []
    group_layers: list[int] = []
    group_of, slot_of = [0] * config.num_layers, [0] * config.num_layers
    for kind, count in zip(kinds, counts, strict=True):
        layers = [layer for layer in attending if config.layers[layer].window == kind]
        num_groups = -(-count // size)
        for part in range(num_groups):
            members = layers[part * count // num_groups : (part + 1) * count // num_groups]
            for slot, layer in enumerate(members):
                group_of[layer], slot_of[layer] = len(group_windows), slot
            group_windows.append(kind)
            group_layers.append(len(members))
    return CacheLayout(
        windows=tuple(group_windows),
        group_layers=tuple(group_layers),
        views=tuple(View(group, window) for group, window in enumerate(group_windows)),
        view_of=tuple(group_of),
        slot_of=tuple(slot_of),
        num_slots=max(group_layers),
    )


def _one_group(
    windows: Sequence[int | None], kept: int | None, attending: Sequence[int], num_layers: int
) -> CacheLayout:
    """All layers share one table; they may see different parts of it."""
    seen = list(dict.fromkeys(windows))
    view_of, slot_of = [0] * num_layers, [0] * num_layers
    for slot, (layer, window) in enumerate(zip(attending, windows, strict=True)):
        view_of[layer], slot_of[layer] = seen.index(window), slot
    return CacheLayout(
        windows=(kept,),
        group_layers=(len(windows),),
        views=tuple(View(0, window) for window in seen),
        view_of=tuple(view_of),
        slot_of=tuple(slot_of),
        num_slots=len(windows),
    )
