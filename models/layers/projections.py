"""Projections of the same input as one matrix product."""

import torch

from troupellm.kernels.linear import PackedLinear, pack
from troupellm.kernels.quantized_linear import merge
from troupellm.models.checkpoint.safetensors import WeightSource


def merged_linear(
    source: WeightSource, names: tuple[str, ...], sizes: tuple[int, ...], in_features: int, *, bias: bool
) -> PackedLinear:
    """Projections of the same input as one: outputs of `sizes`, side by side."""
    weights = [source.linear(name, (size, in_features)) for name, size in zip(names, sizes, strict=True)]
    biases = [source.take(f"{name}.bias", (size,)) for name, size in zip(names, sizes, strict=True)] if bias else []
    return pack(merge(weights), torch.cat(biases) if biases else None)
