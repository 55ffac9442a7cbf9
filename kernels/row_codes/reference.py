"""The definition of `row_codes` in plain torch."""

import torch
from torch import Tensor

from troupellm.kernels.quantized.fp8 import LARGEST
from troupellm.kernels.quantized.int8 import quantize_rows


def row_codes_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `row_codes`; of int8 it is `quantize_rows`, the arithmetic of `Int8Channel`."""
    if dtype == torch.int8:
        return quantize_rows(x)
    x = x.float()
    scale = x.abs().amax(dim=-1) / LARGEST
    values = (x / torch.where(scale > 0, scale, 1.0)[:, None]).clamp(-LARGEST, LARGEST)
    return values.to(dtype), scale
