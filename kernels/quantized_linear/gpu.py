"""Products with quantized weights on a GPU."""

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.base import QuantizedWeight
from troupellm.kernels.quantized_linear.footprint import in_eight_bits
from troupellm.kernels.quantized_linear.fp8 import Fp8
from troupellm.kernels.quantized_linear.int8 import Int8Channel
from troupellm.kernels.quantized_linear.packed_weights import PackedWeight, packed_weight

SCALED_MM_ROWS = 64
"""From this number of rows on, e4m3 uses torch's own product. There arithmetic is the limit, and cuBLAS is faster.
Below, reading the weight is the limit, and one launch that also applies the scales is faster."""


class GpuProduct:
    """Base of the products on a GPU."""

    native = None

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""
        return rows


class EightBitProduct(GpuProduct):
    """Inputs are put into eight bits by row, as those of weights that are to have such inputs."""

    def __init__(self, values: Tensor, scale: Tensor, bias: Tensor | None, *, batch_invariant: bool) -> None:
        self.values, self.scale, self.bias, self.batch_invariant = values, scale, bias, batch_invariant

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features]."""
        from troupellm.kernels.act_quant import quantize_activation  # which stands on this package

        codes, scale = quantize_activation(x, self.values.dtype)
        return self.of_quantized(codes, scale, x.dtype)

    def of_quantized(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The product with inputs that are in eight bits already, as norms and gates can make them."""
        from troupellm.kernels.quantized_linear.triton_linear import eight_bit_product

        if self._to_torch(codes, dtype):
            weight_scale = self.scale[None, :]
            return torch._scaled_mm(
                codes, self.values.t(), scale[:, None], weight_scale, bias=self.bias, out_dtype=dtype
            )
        return eight_bit_product(
            codes, scale, self.values, self.scale, self.bias, dtype, batch_invariant=self.batch_invariant
        )

    def _to_torch(self, codes: Tensor, dtype: torch.dtype) -> bool:
        whole = codes.shape[1] % 16 == 0 and self.values.shape[0] % 16 == 0
        large = codes.is_cuda and codes.shape[0] >= SCALED_MM_ROWS and not self.batch_invariant
        return large and whole and codes.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16


class PackedGpuProduct(GpuProduct):
    """Inputs keep their type; codes are decoded on the way."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None, *, batch_invariant: bool) -> None:
        self.weight, self.bias, self.batch_invariant = weight, bias, batch_invariant

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features]."""
        from troupellm.kernels.quantized_linear.triton_linear import packed_linear

        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        return packed_linear(x, self.weight, self.bias, batch_invariant=self.batch_invariant)


def gpu_product(
    weight: QuantizedWeight, bias: Tensor | None, *, batch_invariant: bool = False
) -> EightBitProduct | PackedGpuProduct | None:
    """The product on a GPU with a weight that `stays` there; None where its numbers forbid it."""
    eight_bits = all(in_eight_bits(outline) for outline in weight.outlines)
    if eight_bits and isinstance(weight, Int8Channel):
        return EightBitProduct(weight.values, weight.scale, bias, batch_invariant=batch_invariant)
    if eight_bits and isinstance(weight, Fp8):
        scale = weight.row_scale().flatten().contiguous()
        return EightBitProduct(weight.values, scale, bias, batch_invariant=batch_invariant)
    found = packed_weight(weight)
    return None if found is None else PackedGpuProduct(found, bias, batch_invariant=batch_invariant)
