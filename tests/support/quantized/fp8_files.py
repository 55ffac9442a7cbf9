"""Weights in e4m3 with one scale, one per output, or one for the usual block."""

import torch
from torch import Tensor


def e4m3_by_tensor(
    weight: Tensor, scale_name: str, inputs: tuple[str, ...], *, channels: bool = False, block: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """The stored tensors of a weight, and their meaning.

    Args:
        scale_name: of the tensor with the weight's scale.
        inputs: names of tensors with calibrated scales of the inputs.
        channels: a scale per output.
        block: the scale is that of one block, which covers the weight.
    """
    largest = weight.abs().amax(dim=1, keepdim=True) if channels else weight.abs().max()
    scale = largest / 448.0
    values = (weight / scale).to(torch.float8_e4m3fn)
    stored = {"weight": values, scale_name: scale.reshape(1, 1) if block else scale}
    stored |= {name: torch.tensor(0.5) for name in inputs}
    return stored, values.float() * scale
