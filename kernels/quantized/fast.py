"""Which quantized weights are computed with as they are, and how."""

from typing import Protocol

from torch import Tensor

from troupellm.kernels.quantized.base import QuantizedWeight
from troupellm.kernels.quantized.int8 import Int8Channel


class FastProduct(Protocol):
    """A quantized weight made ready for many products."""

    def __call__(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias: [rows, in_features] to [rows, out_features], contiguous, the type of `x`."""

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""


def fast_product(weight: QuantizedWeight, bias: Tensor | None) -> FastProduct | None:
    """The fast path of a weight on its device; None is to dequantize it."""
    if isinstance(weight, Int8Channel) and weight.values.device.type == "cpu":
        from troupellm.kernels.quantized.int8_cpu import Int8Product  # which stands on kernels.linear

        return Int8Product(weight, bias)
    return None
