"""Weights of one input in several layouts, as GGUF's mixtures (Q4_K_M) keep queries and values: one below the other,
each in its own blocks."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Self

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear.base import QuantizedWeight, require_same
from troupellm.kernels.quantized_linear.gguf import GgufBlocks
from troupellm.kernels.quantized_linear.outline import Outline


class GgufMixture(QuantizedWeight):
    """Its rows are those of its parts.

    Attributes:
        parts: in their order; neighbours differ in their layouts.
    """

    kind = "gguf"

    def __init__(self, parts: Sequence[GgufBlocks]) -> None:
        """
        Raises:
            Unmergeable: the parts are of different inputs or types.
        """
        require_same(parts, "input_bits")
        runs = [list(run) for _, run in groupby(parts, lambda part: part.layout)]
        self.parts = tuple(GgufBlocks.cat(run) for run in runs)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.dtype = parts[0].dtype

    @property
    def outlines(self) -> tuple[Outline, ...]:
        return tuple(outline for part in self.parts for outline in part.outlines)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat([part.dequantize(dtype) for part in self.parts])

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        return cls([blocks for part in parts for blocks in part.parts])

    def rows(self, index: Tensor | slice) -> Self:
        wanted = torch.arange(self.shape[0])[index].tolist()
        ends = list(accumulate(part.shape[0] for part in self.parts))
        found = []
        for place, run in groupby(wanted, lambda row: next(i for i, end in enumerate(ends) if row < end)):
            part = self.parts[place]
            found.append(part.rows(torch.tensor(list(run)) - (ends[place] - part.shape[0])))
        return type(self)(found)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(part.data for part in self.parts)
