"""Projections of the same input as one matrix product."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from troupellm.kernels.linear import PackedLinear, pack
from troupellm.kernels.meeting import SumOfRanks
from troupellm.kernels.quantized_linear import QuantizedWeight, Weight, merge
from troupellm.models.checkpoint.safetensors import WeightSource


@runtime_checkable
class Divided(Protocol):
    """A source that gives each rank its part of the weights."""

    def sum_of(self, name: str) -> SumOfRanks | None:
        """The sum over ranks of which a layer's result is a part; None: the result is whole, or summed with others.

        Args:
            name: of the layer, without ".weight"; or of all experts of a layer.
        """


def merged_linear(
    source: WeightSource,
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    in_features: int,
    *,
    bias: bool,
    order: Tensor | None = None,
) -> PackedLinear:
    """Projections of the same input as one: outputs of `sizes`, side by side.

    Args:
        order: int64 [outputs], which of the stored outputs become the first, the second and so on; None keeps them.
    """
    weights = [source.linear(name, (size, in_features)) for name, size in zip(names, sizes, strict=True)]
    biases = [source.take(f"{name}.bias", (size,)) for name, size in zip(names, sizes, strict=True)] if bias else []
    weight, joined = merge(weights), torch.cat(biases) if biases else None
    ranks = source.sum_of(names[0]) if isinstance(source, Divided) else None
    if order is None:
        return pack(weight, joined, ranks)
    return pack(rows_of(weight, order), None if joined is None else joined[order], ranks)


def rows_of(weight: Weight, order: Tensor) -> Weight:
    """A weight's outputs in another order."""
    return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]


def grouped_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """The rows of queries, then keys, then values, int64, in a tensor that has them together by head of the keys."""
    queries = num_heads // num_kv_heads
    rows = torch.arange(num_kv_heads * (queries + 2) * head_dim).view(num_kv_heads, queries + 2, head_dim)
    return torch.cat((rows[:, :queries].flatten(), rows[:, queries].flatten(), rows[:, queries + 1].flatten()))
