"""All layers of a decoder in one compiled call, float32, int8 or GGUF weights on a CPU; for few rows, or for any number
where the products take any (`kernels.native`).

A small model's step is a few hundred microseconds of arithmetic in some thirty operations. The interpreter between them
takes as long again, and synchronizing threads at each of them takes more. The operations are the compiled ones of
`kernels.linear`, `kernels.quantized` and `kernels.paged_attention`, to the bit.

Steps therefore need no `torch.compile`: its gain lies between the operations of a graph. One call has nothing between
them, and needs no warm-up.
"""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels import cpp
from troupellm.kernels.cpp import guard
from troupellm.kernels.cpp.checks import check, require
from troupellm.kernels.linear import PackedLinear
from troupellm.kernels.linear.cpu import ANY_ROWS, FEW_ROWS
from troupellm.kernels.low_rank.native import LayerAdapters
from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.cpu import (
    CELLS,
    CppAttention,
    check_caches,
    cpp_plan,
    load as load_attention,
    takes_compiled,
)
from troupellm.kernels.paged_attention.plan import AttentionPlan

UNLIMITED = 2**31
"""Positions of layers without rotations."""
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class FusedLayerWeights:
    """The parts of a layer: norm, attention, projection, norm, gated feed-forward; all sums go to the residual."""

    attention_norm: Tensor | None
    qkv: PackedLinear
    attention: CppAttention
    view: int
    """The cache view, and so the plan, that it uses."""
    rotation: int
    """Index of its rotation, if it has one."""
    out: PackedLinear
    feed_forward_norm: Tensor | None
    gate_up: PackedLinear
    down: PackedLinear
    activation: str
    eps: float
    multiplier: float
    """Factor on the results that are added to the residual."""

    def check(self, hidden: int) -> None:
        """
        Raises:
            RefusedCall: the sizes of the parts do not fit each other.
        """
        attention = self.attention
        width = attention.num_heads * attention.head_dim
        qkv = width + 2 * attention.num_kv_heads * attention.head_dim
        inner = self.gate_up.out_features // 2
        for name, product, outs, ins in (
            ("qkv", self.qkv, qkv, hidden),
            ("out", self.out, hidden, width),
            ("gate_up", self.gate_up, 2 * inner, hidden),
            ("down", self.down, hidden, inner),
        ):
            found = product.out_features, product.in_features
            require(found == (outs, ins), f"{name} is {found[0]} x {found[1]}, not {outs} x {ins}")
        for norm in (self.attention_norm, self.feed_forward_norm):
            if norm is not None:
                check("a norm of a layer", norm.contiguous(), torch.float32, hidden)


class DecoderLayers:
    """The layers in the form of compiled code: `Layer` of layers.h."""

    def __init__(
        self, function: cpp.Function, layers: Sequence[FusedLayerWeights], layer_products: Sequence[Sequence[int]]
    ) -> None:
        """
        Raises:
            RefusedCall: the sizes of the layers do not fit each other.
        """
        self._function = function
        self.hidden = layers[0].qkv.in_features
        for layer in layers:
            layer.check(self.hidden)
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
        self.num_kv_heads = layers[0].attention.num_kv_heads
        self._group = layers[0].attention.num_heads // self.num_kv_heads
        self.num_views = 1 + max(layer.view for layer in layers)
        numbers = [
            [
                *products,
                *(0 if norm is None else norm.data_ptr() for norm in norms),
                layer.attention.pointer,
                layer.view,
                layer.rotation,
                ACTIVATIONS[layer.activation],
                *np.array([layer.eps, layer.multiplier]).view(np.int64).tolist(),
            ]
            for layer, norms, products in zip(layers, self._norms, layer_products, strict=True)
        ]
        self._layers = np.array(numbers, dtype=np.int64)
        self._ranks = layers[0].out.ranks
        self._rotations: Sequence[Pair] = ()
        self._caches = _SameCaches(())
        self._cpp_layers: CppLayers | None = None

    def takes(self, rows: int, plans: Sequence[Plan], caches: Sequence[Pair]) -> bool:
        """True if the compiled code computes a step of this many rows with these plans and caches."""
        return rows <= self.most_rows and caches[0][0].dtype in CELLS and all(takes_compiled(plan) for plan in plans)

    def run(
        self,
        residual: Tensor,
        positions: Tensor,
        views: Sequence[tuple[AttentionPlan, Tensor]],
        rotations: Sequence[Pair],
        caches: Sequence[Pair],
        keep: Tensor | None,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Take the residual through all layers; keys and values are written to the caches.

        Args:
            residual: [rows, hidden], contiguous; it is written to.
            positions: int64 [rows].
            views: per view of the cache, its plan and where keys and values go, as of `kernels.kv_write`.
            rotations: cosines and sines by position, [positions, 1, rotary_dim / 2] each, contiguous.
            caches: per layer, as of `kernels.paged_attention`.
            keep: int64 [kept], the rows to go on with behind the last attention; None is all.
            adapters: of rows that have some.

        Returns:
            output of the last layer [kept, hidden]; if all rows are kept, it is `residual`.

        Raises:
            RefusedCall: a tensor of another type or shape, or numbers that lead out of the caches.
        """
        count = residual.shape[0]
        check("residual", residual, torch.float32, count, self.hidden)
        check("positions", positions, torch.int64, count)
        require(len(views) >= self.num_views, f"{len(views)} views of the cache, the layers name {self.num_views}")
        for _, rows in views:
            check("rows", rows, torch.int64, count * self.num_kv_heads)
        kept = 0 if keep is None else keep.shape[0]
        if keep is not None:
            check("keep", keep, torch.int64, kept)
        out = residual if keep is None else guard.empty("out", kept, self.hidden)
        steps = np.array(
            [(cpp_plan(plan, self._group).pointer, rows.data_ptr()) for plan, rows in views], dtype=np.int64
        )
        self._function(
            self.cpp_layers(rotations, caches).pointer,
            residual.data_ptr(),
            count,
            positions.data_ptr(),
            steps.ctypes.data,
            len(views),
            None if keep is None else keep.data_ptr(),
            kept,
            out.data_ptr(),
            None if adapters is None else adapters.pointer,
            torch.get_num_threads(),
        )
        if self._ranks is not None:
            self._ranks.check()
        return out

    def cpp_layers(self, rotations: Sequence[Pair], caches: Sequence[Pair]) -> "CppLayers":
        """The layers with the rotations and caches of `run`, in the form of compiled code."""
        if self._cpp_layers is None or self._rotations is not rotations or not self._caches.are(caches):
            self._check(rotations, caches)
            self._rotations, self._caches = rotations, _SameCaches(caches)
            meeting = 0 if self._ranks is None else self._ranks.pointer
            self._cpp_layers = CppLayers(self._layers, self.hidden, self.num_kv_heads, rotations, caches, meeting)
        return self._cpp_layers

    def _check(self, rotations: Sequence[Pair], caches: Sequence[Pair]) -> None:
        """
        Raises:
            RefusedCall: these are no caches of the layers, or there are no angles that a layer turns by.
        """
        require(len(caches) == len(self._held), f"{len(caches)} caches of {len(self._held)} layers")
        first = caches[0][0]
        for layer, pair in zip(self._held, caches, strict=True):
            check_caches(pair, self.num_kv_heads, layer.attention.head_dim)
            alike = pair[0].dtype == first.dtype and pair[0].shape[::2] == first.shape[::2]
            require(alike, "the caches of the layers differ in type or size")
            if half := layer.attention.half:
                require(0 <= layer.rotation < len(rotations), f"{len(rotations)} rotations, none is {layer.rotation}")
                for angles in rotations[layer.rotation]:
                    check("angles", angles, torch.float32, angles.shape[0], 1, half)


class CppLayers:
    """`struct Layers` of layers.h; good for as long as the caches are there."""

    __slots__ = ("_held", "numbers", "pointer")

    def __init__(
        self,
        layers: NDArray[np.int64],
        hidden: int,
        num_kv_heads: int,
        rotations: Sequence[Pair],
        caches: Sequence[Pair],
        meeting: int = 0,
    ) -> None:
        """meeting: address of the ranks' `Meeting`; 0 where this process has the whole layers."""
        angles, memory = (
            np.array([(one.data_ptr(), two.data_ptr()) for one, two in pairs], dtype=np.int64)
            for pairs in (rotations, caches)
        )
        positions = min((one.shape[0] for pair in rotations for one in pair), default=UNLIMITED)
        self.numbers = np.array(
            [layers.ctypes.data, len(layers), hidden, angles.ctypes.data, memory.ctypes.data,
             CELLS[caches[0][0].dtype], caches[0][0].shape[0], num_kv_heads, caches[0][0].shape[2], positions, meeting],
            dtype=np.int64,
        )  # fmt: skip
        self._held, self.pointer = (layers, angles, memory), self.numbers.ctypes.data


class _SameCaches:
    """Recognises the caches of the step before, without keeping them alive."""

    def __init__(self, caches: Sequence[Pair]) -> None:
        self._seen = [(weakref.ref(keys), weakref.ref(values)) for keys, values in caches]

    def are(self, caches: Sequence[Pair]) -> bool:
        """True if these are the same tensor objects."""
        if len(caches) != len(self._seen):
            return False
        for (keys, values), (first, second) in zip(caches, self._seen, strict=True):
            if first() is not keys or second() is not values:
                return False
        return True


def decoder_layers(layers: Sequence[FusedLayerWeights]) -> DecoderLayers | None:
    """Layers as one call; None where some product has no part in it, heads differ, or without compiled code."""
    heads = {(layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim) for layer in layers}
    function = load() if len(heads) == 1 else None
    found = [_products(layer) for layer in layers]
    known = [products for products in found if products is not None]
    return None if function is None or len(known) < len(found) else DecoderLayers(function, layers, known)


def own_products(layers: Sequence[FusedLayerWeights], head: PackedLinear | None) -> bool:
    """True if compiled code computes every product of the layers and the head, for any number of rows."""
    products = [head, *(product for layer in layers for product in (layer.qkv, layer.out, layer.gate_up, layer.down))]
    return all(product is not None and product.native is not None and product.invariant for product in products)


def _products(layer: FusedLayerWeights) -> list[int] | None:
    """Kind and address of each weight."""
    found: list[int] = []
    for product in (layer.qkv, layer.out, layer.gate_up, layer.down):
        if product.native is None or product.native.part is None:
            return None
        if product.ranks is not None and not product.ranks.pointer:
            return None
        found += product.native.part
    assert layer.gate_up.native is not None
    return found if layer.gate_up.native.gates else None


@functools.cache
def load() -> cpp.Function | None:
    """The compiled function. Its operations were compared with their references one by one."""
    library = cpp.load()
    if library is None or load_attention() is None:
        return None
    return library.function("decoder_layers", "ppip" + "pi" + "pip" + "p" + "i")
