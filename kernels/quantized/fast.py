"""Which quantized weights are computed with as they are, and how."""

from typing import Protocol

from torch import Tensor

from troupellm.kernels.quantized.base import QuantizedWeight
from troupellm.kernels.quantized.int8 import Int8Channel


class FastProduct(Protocol):
    """A quantized weight made ready for many products."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T + bias: [rows, in_features] to [rows, out_features], contiguous, the type of `x`."""


def fast_product(weight: QuantizedWeight) -> FastProduct | None:
    """The fast path of a weight on its device; None is to dequantize it."""
    return weight.product if isinstance(weight, Int8Channel) else None
