"""Chooses the product of each quantized weight that is used without dequantizing it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariance
from troupellm.kernels.quantized_linear import cpu_blocks, cpu_int8, cpu_packed
from troupellm.kernels.quantized_linear.base import QuantizedWeight
from troupellm.kernels.quantized_linear.footprint import stays
from troupellm.kernels.quantized_linear.gguf import GgufBlocks
from troupellm.kernels.quantized_linear.gguf_mixture import GgufMixture
from troupellm.kernels.quantized_linear.int8 import Int8Channel
from troupellm.kernels.quantized_linear.packed_weights import packed_weight


class FewRows(Protocol):
    """Compiled products of few rows, float32, that take a norm before and a gate or a sum behind into the same walk."""

    @property
    def gates(self) -> bool:
        """True if `gated` is available."""

    @property
    def part(self) -> tuple[int, int] | None:
        """The weight in the form of `kernels.decoder_layers`, kind and address; None if it cannot be used there."""

    @property
    def most_rows(self) -> int:
        """From this number of rows on, other products are as fast."""

    def linear(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None, factor: float) -> Tensor:
        """The product of `x` [rows, in], behind a norm where one is given; written to a new tensor, or added to `out`
        [rows, out] times `factor`."""

    def gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str) -> Tensor:
        """activation(first half) * second half of the product of `x` [rows, in]: [rows, out / 2]."""


class FastProduct(Protocol):
    """A quantized weight made ready for many products."""

    @property
    def native(self) -> FewRows | None:
        """The faster product for few rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias: [rows, in_features] to [rows, out_features], contiguous, the type of `x`."""

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""


class SideBySide:
    """The products with weights one below the other; nothing is fused with them."""

    native: FewRows | None = None

    def __init__(self, products: Sequence[FastProduct]) -> None:
        self._products = tuple(products)

    def __call__(self, x: Tensor) -> Tensor:
        """As `FastProduct`."""
        return torch.cat([product(x) for product in self._products], dim=1)

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""
        return rows


def fast_product(weight: QuantizedWeight, bias: Tensor | None) -> FastProduct | None:
    """The fast path of a weight on its device; None is to dequantize it."""
    if isinstance(weight, GgufBlocks | GgufMixture):
        return _gguf_product(weight, bias)
    return _one_product(weight, bias)


def _gguf_product(weight: GgufBlocks | GgufMixture, bias: Tensor | None) -> FastProduct | None:
    """All parts in one product where there is such a thing, else side by side; None if some part has no product."""
    parts = weight.parts if isinstance(weight, GgufMixture) else (weight,)
    if parts[0].data.device.type == "cpu" and weight.dtype == torch.float32:
        found = cpu_blocks.block_product(parts, bias)
        if found is not None:
            return found
    if isinstance(weight, GgufBlocks):
        return _one_product(weight, bias)
    sizes = [part.shape[0] for part in parts]
    biases: Sequence[Tensor | None] = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
    products = [fast_product(part, own) for part, own in zip(parts, biases, strict=True)]
    known = [product for product in products if product is not None]
    return SideBySide(known) if len(known) == len(products) else None


def _one_product(weight: QuantizedWeight, bias: Tensor | None) -> FastProduct | None:
    device = weight.tensors()[0].device
    if not all(stays(outline, device, weight.dtype) for outline in weight.outlines):
        return None
    if device.type == "cuda":
        from troupellm.kernels.quantized_linear.gpu import gpu_product

        return gpu_product(weight, bias, batch_invariant=batch_invariance())
    if isinstance(weight, Int8Channel):
        return cpu_int8.Int8Product(weight, bias)
    if (codes := packed_weight(weight)) is None:
        return None
    return cpu_blocks.int4_product(codes, bias) or cpu_packed.packed_product(codes, weight.shape, bias)
