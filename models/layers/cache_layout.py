"""Assigns layers to block tables, and each layer's keys and values to a place in the cache's memory.

Layers that keep the same part of a sequence (all of it, or a window) and have keys of one size form cache groups, which
fill equally many slots of a block. A block has therefore the same size in every group, and one pool of blocks serves
all groups, for any mix of long and short sequences. Layers of different groups share a slot, since a block belongs to
one group at a time.

A slot is as large as the widest layer's keys. Several narrower layers lie in one slot, where their size divides it:
their views of the memory have blocks of their own size, of which each begins a whole number behind the one before.
"""

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerShape

NEARLY_EQUAL = 1.5
"""Kinds whose numbers of slots differ by less get one group each, the smaller one with slots that stay empty."""
MOST_WASTE = 0.25
"""Part of the blocks that may stay empty in cache groups; beyond, all layers share one group."""


class Heads(msgspec.Struct, frozen=True):
    """Sizes of a layer's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class View(msgspec.Struct, frozen=True):
    """The part of a cache group's sequence that some of its layers see, and the form in which they see the memory."""

    group: int
    window: int | None
    """The number of keys that a token sees, itself included; None is all."""
    heads: Heads
    chunk: int | None = None
    """As of `LayerShape`."""
    stride: int = 1
    """Blocks of these layers' size in a slot's block: a block id times this is theirs."""


class Store(msgspec.Struct, frozen=True):
    """Memory of slots that are equally large."""

    num_slots: int
    num_kv_heads: int
    head_dim: int


class Place(msgspec.Struct, frozen=True):
    """Where a layer's keys and values lie."""

    store: int
    slot: int
    part: int = 0
    """Blocks of the layer's own size before it in the slot."""


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes are per layer where they are named `..._of`."""

    windows: tuple[int | None, ...]
    """Per group, which positions its blocks are kept for; None is all."""
    group_layers: tuple[int, ...]
    """Per group, how many layers it has."""
    group_shares: tuple[float, ...]
    """Per group, the part of a block that its layers fill."""
    views: tuple[View, ...]
    view_of: tuple[int, ...]
    """Index into `views`."""
    stores: tuple[Store, ...]
    place_of: tuple[Place, ...]

    @property
    def even(self) -> bool:
        """True if all layers have heads of the same sizes."""
        return len({view.heads for view in self.views}) == 1


class _Kind(msgspec.Struct, frozen=True):
    """The layers that can share a group."""

    window: int | None
    """Positions that are kept: of a chunk it may be more than are seen."""
    num_kv_heads: int
    head_dim: int

    @property
    def size(self) -> int:
        return self.num_kv_heads * self.head_dim


def with_cache_groups(config: DecoderConfig, longest: int, *, hybrid: bool) -> DecoderConfig:
    """The same model, whose layers with a window have cache groups of their own.

    Args:
        longest: positions of a sequence; a window or a chunk that none outgrows is none, and queries that grow for none
            do not.
        hybrid: False keeps all layers in one group, which keeps every position.
    """
    windows = tuple(None if window is None or window >= longest else window for window in config.windows)
    chunks = tuple(None if shape.chunk is None or shape.chunk >= longest else shape.chunk for shape in config.layers)
    growth = config.query_growth
    if growth is not None and growth.original >= longest + growth.ahead:
        growth = None
    grown = msgspec.structs.replace(config, hybrid_cache=hybrid, query_growth=growth)
    return grown.with_layers(window=windows, chunk=chunks)


@lru_cache(16)
def cache_layout(config: DecoderConfig) -> CacheLayout:
    """The groups of a model's layers. One, unless layers differ in their windows and `hybrid_cache` is on. Layers that
    have states instead of keys and values are in none: they have the first view and place, and use neither."""
    kinds: dict[_Kind, list[int]] = {}
    for layer, shape in enumerate(config.layers):
        if shape.kv_from is None and shape.mixer == "attention":
            kinds.setdefault(_Kind(shape.window or shape.chunk, shape.num_kv_heads, shape.head_dim), []).append(layer)
    if not kinds:  # blocks name prefixes all the same
        kinds[_Kind(None, config.layers[0].num_kv_heads, config.layers[0].head_dim)] = [0]
    windows = list(dict.fromkeys(kind.window for kind in kinds))
    groups = _groups(kinds) if config.hybrid_cache and len(windows) > 1 else None
    if groups is None:
        return _one_group(config.layers, kinds, windows[0] if config.hybrid_cache and len(windows) == 1 else None)
    return groups.layout(config.layers)


class _Groups:
    """Cache groups that share the slots of one store."""

    def __init__(self, kinds: dict[_Kind, list[int]], num_slots: int) -> None:
        self.num_slots = num_slots
        self.widest = max(kinds, key=lambda kind: kind.size)
        self.members: list[tuple[_Kind, list[int]]] = []
        """Per group, its kind and its layers."""
        for kind, layers in kinds.items():
            count = -(-len(layers) // (num_slots * self.stride(kind)))
            for part in range(count):
                some = layers[part * len(layers) // count : (part + 1) * len(layers) // count]
                self.members.append((kind, some))

    def stride(self, kind: _Kind) -> int:
        return self.widest.size // kind.size

    def shares(self) -> tuple[float, ...]:
        """Per group, the part of the slots that it fills."""
        whole = self.num_slots * self.widest.size
        return tuple(len(layers) * kind.size / whole for kind, layers in self.members)

    def layout(self, shapes: tuple[LayerShape, ...]) -> CacheLayout:
        group_of, places = {}, {}
        for group, (kind, layers) in enumerate(self.members):
            for index, layer in enumerate(layers):
                slot, part = divmod(index, self.stride(kind))
                group_of[layer], places[layer] = group, Place(0, slot, part)
        return _layout(
            shapes,
            windows=tuple(kind.window for kind, _ in self.members),
            shares=self.shares(),
            group_of=group_of,
            strides={layer: self.stride(kind) for kind, layers in self.members for layer in layers},
            stores=(Store(self.num_slots, self.widest.num_kv_heads, self.widest.head_dim),),
            places=places,
        )


def _groups(kinds: dict[_Kind, list[int]]) -> _Groups | None:
    """Groups of equally many slots; None where the sizes do not divide the largest, or too much would stay empty."""
    widest = max(kind.size for kind in kinds)
    if any(widest % kind.size for kind in kinds):
        return None
    counts = [-(-len(layers) * kind.size // widest) for kind, layers in kinds.items()]
    found = _Groups(kinds, max(counts) if max(counts) < NEARLY_EQUAL * min(counts) else min(counts))
    shares = found.shares()
    return found if sum(shares) >= (1 - MOST_WASTE) * len(shares) else None


def _one_group(shapes: tuple[LayerShape, ...], kinds: dict[_Kind, list[int]], kept: int | None) -> CacheLayout:
    """All layers share one table; they may see different parts of it, and have slots of their own sizes."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for kind, layers in kinds.items():
        sizes.setdefault((kind.num_kv_heads, kind.head_dim), []).extend(layers)
    places = {
        layer: Place(store, slot)
        for store, layers in enumerate(sizes.values())
        for slot, layer in enumerate(sorted(layers))
    }
    return _layout(
        shapes,
        windows=(kept,),
        shares=(1.0,),
        group_of=dict.fromkeys(places, 0),
        strides=dict.fromkeys(places, 1),
        stores=tuple(Store(len(layers), *size) for size, layers in sizes.items()),
        places=places,
    )


def _layout(
    shapes: tuple[LayerShape, ...],
    *,
    windows: tuple[int | None, ...],
    shares: tuple[float, ...],
    group_of: dict[int, int],
    strides: dict[int, int],
    stores: tuple[Store, ...],
    places: dict[int, Place],
) -> CacheLayout:
    """group_of, strides, places: of layers that have keys and values of their own."""
    used = [layer if shape.mixer == "attention" else min(places) for layer, shape in enumerate(shapes)]
    source_of = [layer if (source := shapes[layer].kv_from) is None else source for layer in used]
    views = [
        View(
            group_of[source],
            shapes[layer].window,
            Heads(shapes[layer].num_heads, shapes[layer].num_kv_heads, shapes[layer].head_dim),
            shapes[layer].chunk,
            strides[source],
        )
        for layer, source in zip(used, source_of, strict=True)
    ]
    each = _in_order(views, len(windows))
    return CacheLayout(
        windows=windows,
        group_layers=tuple(list(group_of.values()).count(group) for group in range(len(windows))),
        group_shares=shares,
        views=each,
        view_of=tuple(each.index(view) for view in views),
        stores=stores,
        place_of=tuple(places[source] for source in source_of),
    )


def _in_order(views: Iterable[View], num_groups: int) -> tuple[View, ...]:
    """Each view once, by group, and within a group in the order of the layers."""
    each = list(dict.fromkeys(views))
    return tuple(view for group in range(num_groups) for view in each if view.group == group)
