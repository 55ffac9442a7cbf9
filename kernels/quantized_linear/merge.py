"""Merges several weights with the same input into one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.base import QuantizedWeight, Unmergeable
from troupellm.kernels.quantized_linear.gguf import GgufBlocks
from troupellm.kernels.quantized_linear.gguf_mixture import GgufMixture

Weight = Tensor | QuantizedWeight


def merge(parts: Sequence[Weight]) -> Weight:
    """One below the other: quantized where all are of one kind, else dequantized.

    Args:
        parts: each [out_features, in_features] of the same input.
    """
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts) and len({type(part) for part in quantized}) == 1:
        try:
            return type(quantized[0]).cat(quantized)
        except Unmergeable:
            blocks = [part for part in quantized if isinstance(part, GgufBlocks)]
            if len(blocks) == len(parts):
                return GgufMixture(blocks)
    return torch.cat([part.dequantize() if isinstance(part, QuantizedWeight) else part for part in parts])
