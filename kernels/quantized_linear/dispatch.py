"""Chooses the product of each quantized weight that is used without dequantizing it."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariance
from troupellm.kernels.quantized_linear.base import QuantizedWeight
from troupellm.kernels.quantized_linear.footprint import stays
from troupellm.kernels.quantized_linear.gguf_mixture import GgufMixture
from troupellm.kernels.quantized_linear.int8 import Int8Channel


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
    if isinstance(weight, GgufMixture):
        return _mixture_product(weight, bias)
    device = weight.tensors()[0].device
    if not all(stays(outline, device, weight.dtype) for outline in weight.outlines):
        return None
    if device.type == "cuda":
        from troupellm.kernels.quantized_linear.gpu import gpu_product

        return gpu_product(weight, bias, batch_invariant=batch_invariance())
    from troupellm.kernels.quantized_linear import (
        cpu_int8,  # which stand on kernels.linear
        cpu_packed,
    )

    if isinstance(weight, Int8Channel):
        return cpu_int8.Int8Product(weight, bias)
    return cpu_packed.packed_product(weight, bias)


def _mixture_product(weight: GgufMixture, bias: Tensor | None) -> SideBySide | None:
    """The product of a mixture; None if any of its parts has none."""
    sizes = [part.shape[0] for part in weight.parts]
    biases: Sequence[Tensor | None] = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
    found = [fast_product(part, own) for part, own in zip(weight.parts, biases, strict=True)]
    products = [product for product in found if product is not None]
    return SideBySide(products) if len(products) == len(found) else None
