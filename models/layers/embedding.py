"""The vectors of all tokens: a table of numbers, or a weight in the blocks of a GGUF file."""

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.linear import PackedLinear
from troupellm.kernels.quantized_linear import GgufBlocks, QuantizedWeight, Weight, fast_product, in_blocks
from troupellm.kernels.quantized_linear.cpu_blocks import BlockProduct


class Embedding:
    """Vectors of tokens.

    Attributes:
        table: [vocab, hidden]; None where `blocks` has the vectors.
        blocks: the weight in blocks, of which a row is decoded when it is asked for; a head that is tied shares it.
    """

    __slots__ = ("blocks", "device", "dtype", "shape", "table")

    def __init__(self, weight: Weight, head: PackedLinear | None) -> None:
        """
        Args:
            head: made of the same weight; None where the model has another head, or none.
        """
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.blocks: BlockProduct | None = None
        self.table: Tensor | None = None
        if isinstance(weight, GgufBlocks) and in_blocks(weight.outlines[0], weight.data.device, weight.dtype):
            found = fast_product(weight, None) if head is None else head.fast
            self.blocks = found if isinstance(found, BlockProduct) else None
        if self.blocks is None:
            self.table = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        self.device = torch.device("cpu") if self.table is None else self.table.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """New vectors [tokens, hidden] of token ids int64 [tokens]."""
        if self.blocks is not None:
            return self.blocks.rows(token_ids)
        assert self.table is not None
        return functional.embedding(token_ids, self.table)

    def new_empty(self, *shape: int) -> Tensor:
        """A tensor of the vectors' type, on their device."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
