"""The blocks of GGUF files, kept as they are; layouts and arithmetic after the format's reference (ggml)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from troupellm.kernels.quantized.base import QuantizedWeight, require, require_same
from troupellm.kernels.quantized.outline import Outline


class GgufBlocks(QuantizedWeight):
    """Rows of blocks, each with its own scales; inputs keep their type.

    Attributes:
        data: uint8 [out_features, bytes of a row].
        layout: Q8_0, Q4_0, Q4_K or Q6_K.
    """

    kind = "gguf"

    def __init__(self, data: Tensor, layout: str, *, dtype: torch.dtype = torch.float32) -> None:
        """
        Raises:
            ValueError: there is no such layout, or rows are not of whole blocks.
        """
        require(layout in LAYOUTS, f"there is no layout {layout}; there are {', '.join(LAYOUTS)}")
        require(data.ndim == 2 and data.dtype == torch.uint8, "data must be uint8 [out, bytes]")
        block = LAYOUTS[layout]
        require(data.shape[1] % block.size == 0, f"rows must be multiples of {block.size} bytes")
        self.data, self.layout = data.contiguous(), layout
        self.shape, self.dtype = (data.shape[0], data.shape[1] // block.size * block.weights), dtype

    @property
    def outlines(self) -> tuple[Outline, ...]:
        return (blocks_outline(self.layout, *self.shape),)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        block = LAYOUTS[self.layout]
        return block.read(self.data.view(-1, block.size)).weights().view(self.shape).to(dtype or self.dtype)

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        require_same(parts, "layout")
        return cls(torch.cat([part.data for part in parts]), parts[0].layout, dtype=parts[0].dtype)

    def rows(self, index: Tensor | slice) -> Self:
        return type(self)(self.data[index], self.layout, dtype=self.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)


def halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 at a byte of each block, float32 [blocks, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


@dataclass(frozen=True, slots=True)
class Fields:
    """What blocks say: w = scale * (numbers - middle) + offset.

    Attributes:
        numbers: whole, [blocks, weights].
        scale: float32 [blocks, groups], of equal runs of weights.
        offset: like `scale`, or None.
        bits: that the numbers take: four without a sign, or eight with one (where `middle` is 0).
    """

    numbers: Tensor
    scale: Tensor
    offset: Tensor | None = None
    bits: int = 8
    middle: int = 0

    def weights(self) -> Tensor:
        """float32 [blocks, weights]."""
        grouped = (self.numbers.float() - self.middle).view(*self.scale.shape, -1) * self.scale[..., None]
        return (grouped if self.offset is None else grouped + self.offset[..., None]).flatten(1)


def q8_0(blocks: Tensor) -> Fields:
    """32 weights: scale d, then signed bytes; w = d * q."""
    return Fields(blocks[:, 2:].view(torch.int8), halves(blocks, 0))


def q4_0(blocks: Tensor) -> Fields:
    """32 weights: scale d, then 16 bytes whose low halves come first; w = d * (q - 8)."""
    nibbles = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), dim=1)
    return Fields(nibbles, halves(blocks, 0), bits=4, middle=8)


def q4_k(blocks: Tensor) -> Fields:
    """256 weights in 8 groups: d, dmin, 8 scales and minima of six bits in 12 bytes; w = d * scale * q - dmin * min."""
    packed, nibbles = blocks[:, 4:16].int(), blocks[:, 16:].view(-1, 4, 1, 32)
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=1)
    numbers = torch.cat((nibbles & 15, nibbles >> 4), dim=2).view(-1, 256)
    return Fields(numbers, halves(blocks, 0) * scales, -halves(blocks, 2) * minima, bits=4)


def q6_k(blocks: Tensor) -> Fields:
    """256 weights in 16 groups: four low bits, two high bits, signed scales, d; w = d * scale * (q - 32)."""
    low, high = blocks[:, :128].view(-1, 2, 1, 64), blocks[:, 128:192].view(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), dim=2).view(-1, 2, 4, 32)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    numbers = (low | (high << 4)).view(-1, 256).to(torch.int8) - 32
    return Fields(numbers, halves(blocks, 208) * blocks[:, 192:208].view(torch.int8))


def fields_of(weight: GgufBlocks) -> Fields:
    """What all blocks of a weight say, with numbers [out_features, in_features] and scales [out_features, groups]."""
    block, rows = LAYOUTS[weight.layout], weight.shape[0]
    fields = block.read(weight.data.view(-1, block.size))
    offset = None if fields.offset is None else fields.offset.reshape(rows, -1)
    return replace(
        fields, numbers=fields.numbers.reshape(rows, -1), scale=fields.scale.reshape(rows, -1), offset=offset
    )


def blocks_outline(layout: str, rows: int, columns: int) -> Outline:
    """Of a weight in such blocks, as the whole numbers that they say."""
    block = LAYOUTS[layout]
    fields = block.read(torch.zeros(1, block.size, dtype=torch.uint8))
    group, offsets = block.weights // fields.scale.shape[1], fields.offset is not None
    return Outline("int4" if fields.bits == 4 else "int8", rows, columns, group, offsets=offsets)


@dataclass(frozen=True, slots=True)
class Layout:
    weights: int
    size: int
    """Bytes of a block."""
    read: Callable[[Tensor], Fields]
    """Of blocks uint8 [blocks, size]."""


LAYOUTS = {
    "Q8_0": Layout(32, 34, q8_0),
    "Q4_0": Layout(32, 18, q4_0),
    "Q4_K": Layout(256, 144, q4_k),
    "Q6_K": Layout(256, 210, q6_k),
}
