"""All layers of a decoder in one compiled call, float32 or int8 weights on a CPU; few rows, or where the products do
(`kernels.native`) any number.

A small model's step is a few hundred microseconds of arithmetic in some thirty operations; the interpreter between them
takes as long again, and threads that wait for each other at every one of them take more. The operations are the
compiled ones of `kernels.linear`, `kernels.quantized` and `kernels.paged_attention`, to the bit.

That is why steps do without `torch.compile`: what it gains lies between the operations of a graph, and one call leaves
nothing there and needs no warm-up.
"""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels import native
from troupellm.kernels.linear import PackedLinear
from troupellm.kernels.linear.native import ANY_ROWS, FEW_ROWS
from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.native import (
    CELLS,
    NativeAttention,
    load as load_attention,
    takes_compiled,
    told,
)
from troupellm.kernels.paged_attention.plan import AttentionPlan

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a layer is made of: norm, attention, projection, norm, gated feed-forward; all sums go to the residual."""

    attention_norm: Tensor | None
    qkv: PackedLinear
    attention: NativeAttention
    view: int
    """Of the cache: which plan it follows."""
    rotation: int
    """Which angles it turns by, where it turns at all."""
    out: PackedLinear
    feed_forward_norm: Tensor | None
    gate_up: PackedLinear
    down: PackedLinear
    activation: str
    eps: float
    multiplier: float
    """Of what is added to the residual."""


class DecoderLayers:
    """What compiled code is told of the layers: `Layer` of layers.h."""

    def __init__(self, function: native.Function, layers: Sequence[LayerParts], told: Sequence[Sequence[int]]) -> None:
        self._function = function
        self._norms = [
            [None if norm is None else norm.contiguous() for norm in (layer.attention_norm, layer.feed_forward_norm)]
            for layer in layers
        ]
        self._held = list(layers)
        most = min(
            product.native.most_rows
            for layer in layers
            for product in (layer.qkv, layer.out, layer.gate_up, layer.down)
            if product.native is not None
        )
        self.most_rows = most if most == ANY_ROWS else min(most, FEW_ROWS)
        """Beyond, where products have to be cut, each is better dealt out by itself."""
        self._group = layers[0].attention.num_heads // layers[0].attention.num_kv_heads
        numbers = [
            [
                *products,
                *(0 if norm is None else norm.data_ptr() for norm in norms),
                layer.attention.pointer, layer.view, layer.rotation, ACTIVATIONS[layer.activation],
                *np.array([layer.eps, layer.multiplier]).view(np.int64).tolist(),
            ]
            for layer, norms, products in zip(layers, self._norms, told, strict=True)
        ]  # fmt: skip
        self._layers = np.array(numbers, dtype=np.int64)
        self._hidden = layers[0].qkv.in_features
        self._rotations: Sequence[Pair] = ()
        self._caches = _SameCaches(())
        self._told: ToldLayers | None = None

    def takes(self, rows: int, plans: Sequence[Plan], caches: Sequence[Pair]) -> bool:
        """Whether this computes a step of so many rows, with these plans and caches."""
        return rows <= self.most_rows and caches[0][0].dtype in CELLS and all(takes_compiled(plan) for plan in plans)

    def run(
        self, residual: Tensor, positions: Tensor, views: Sequence[tuple[AttentionPlan, Tensor]],
        rotations: Sequence[Pair], caches: Sequence[Pair], keep: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Take the residual through all layers; keys and values are written to the caches.

        Args:
            residual: [rows, hidden], contiguous; it is written to.
            positions: int64 [rows].
            views: per view of the cache, its plan and where keys and values go, as of `kernels.kv_write`.
            rotations: cosines and sines by position, [positions, 1, rotary_dim / 2] each, contiguous.
            caches: per layer, as of `kernels.paged_attention`.
            keep: int64 [kept], the rows to go on with behind the last attention; None is all.

        Returns:
            what leaves the last layer [kept, hidden]; of all rows it is `residual`.
        """
        kept = 0 if keep is None else keep.shape[0]
        out = residual if keep is None else torch.empty(kept, residual.shape[1], dtype=torch.float32)
        steps = np.array([(told(plan, self._group).pointer, rows.data_ptr()) for plan, rows in views], dtype=np.int64)
        self._function(
            self.told(rotations, caches).pointer, residual.data_ptr(), residual.shape[0], positions.data_ptr(),
            steps.ctypes.data, None if keep is None else keep.data_ptr(), kept, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out

    def told(self, rotations: Sequence[Pair], caches: Sequence[Pair]) -> "ToldLayers":
        """What compiled code is told of them with the rotations and caches of `run`."""
        if self._told is None or self._rotations is not rotations or not self._caches.are(caches):
            self._rotations, self._caches = rotations, _SameCaches(caches)
            self._told = ToldLayers(self._layers, self._hidden, rotations, caches)
        return self._told


class ToldLayers:
    """`struct Layers` of layers.h; good for as long as the caches are there."""

    __slots__ = ("_held", "numbers", "pointer")

    def __init__(
        self, layers: NDArray[np.int64], hidden: int, rotations: Sequence[Pair], caches: Sequence[Pair]
    ) -> None:
        angles, memory = (
            np.array([(one.data_ptr(), two.data_ptr()) for one, two in pairs], dtype=np.int64)
            for pairs in (rotations, caches)
        )
        self.numbers = np.array(
            [layers.ctypes.data, len(layers), hidden, angles.ctypes.data, memory.ctypes.data,
             CELLS[caches[0][0].dtype]],
            dtype=np.int64,
        )  # fmt: skip
        self._held, self.pointer = (layers, angles, memory), self.numbers.ctypes.data


class _SameCaches:
    """Whether caches are those of the step before, without keeping them."""

    def __init__(self, caches: Sequence[Pair]) -> None:
        self._seen = [(weakref.ref(keys), weakref.ref(values)) for keys, values in caches]

    def are(self, caches: Sequence[Pair]) -> bool:
        """Whether these are the very tensors."""
        if len(caches) != len(self._seen):
            return False
        for (keys, values), (first, second) in zip(caches, self._seen, strict=True):
            if first() is not keys or second() is not values:
                return False
        return True


def decoder_layers(layers: Sequence[LayerParts]) -> DecoderLayers | None:
    """Layers as one call; None where some product has no part in it, or without compiled code."""
    function = load()
    told = [_products(layer) for layer in layers]
    known = [products for products in told if products is not None]
    return None if function is None or len(known) < len(told) else DecoderLayers(function, layers, known)


def _products(layer: LayerParts) -> list[int] | None:
    """Kind and address of each weight."""
    found: list[int] = []
    for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
        if product.native is None or product.native.part is None:
            return None
        found += product.native.part
    assert layer.gate_up.native is not None
    return found if layer.gate_up.native.gates else None


@functools.cache
def load() -> native.Function | None:
    """The compiled function. Its operations were compared with their references one by one."""
    library = native.load()
    if library is None or load_attention() is None:
        return None
    return library.function("decoder_layers", "ppip" + "p" + "pip" + "i")
