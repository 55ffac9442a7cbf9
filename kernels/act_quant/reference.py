"""The definition of `quantize_activation` in plain torch."""

import torch
from torch import Tensor

LARGEST_INT8 = 127
LARGEST_E4M3 = 448.0


def quantize_activation_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `quantize_activation`; of int8 it is `quantize_rows`."""
    if dtype == torch.int8:
        return quantize_rows(x)
    x = x.float()
    scale = x.abs().amax(dim=-1) / LARGEST_E4M3
    values = (x / torch.where(scale > 0, scale, 1.0)[:, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return values.to(dtype), scale


def rounded_groups(x: Tensor, top: int, size: int = 32) -> Tensor:
    """Each `size` inputs of rows `x` [rows, inputs] as whole numbers up to `top` times one scale, s = max|x| / top; as
    float32 [rows, inputs]. A group with a NaN is all NaN."""
    groups = x.float().reshape(x.shape[0], x.shape[1] // size, size)  # -1 is ambiguous without rows
    scale = groups.abs().amax(dim=-1, keepdim=True) / top
    rounded: Tensor = torch.round(groups / torch.where(scale > 0, scale, 1.0)) * scale
    return rounded.view(x.shape)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of `x` [rows, size] in eight bits: values int8 of -127 to 127, and scale float32 [rows]."""
    x = x.float()
    scale = x.abs().amax(dim=-1) / LARGEST_INT8
    values = torch.round(x / torch.where(scale > 0, scale, 1.0)[:, None])
    return values.to(torch.int8), scale


def quantize_groups(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Each `size` inputs of rows `x` [rows, inputs] in eight bits, of which the last ones may be fewer: values int8
    [rows, inputs] of -127 to 127, and scale float32 [rows, groups]."""
    x = x.float()
    parts = [quantize_rows(part) for part in torch.split(x, size, 1)]
    return torch.cat([values for values, _ in parts], 1), torch.stack([scale for _, scale in parts], 1)
