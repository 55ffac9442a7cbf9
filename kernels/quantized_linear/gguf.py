"""Weights in the blocks of GGUF files, kept as they are stored."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, Self

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import gguf_basic, gguf_i_quants, gguf_k_quants
from troupellm.kernels.quantized_linear.base import QuantizedWeight, require, require_same
from troupellm.kernels.quantized_linear.gguf_fields import Fields, counting_from, unpack_nibbles
from troupellm.kernels.quantized_linear.mx import Mx
from troupellm.kernels.quantized_linear.outline import Code, Outline

SLAB_WEIGHTS = 2**20
"""Unpacked together: what lies between packed blocks and the result takes little memory and stays in the caches."""


InputBits = Literal[8, 15]
FINE: Final[InputBits] = 15
LARGEST: dict[InputBits, int] = {8: 127, 15: 16319}
"""Whole numbers that inputs are rounded to, see `act_quant.reference.rounded_groups`: 16319 is 127 * 128 + 63."""


class GgufBlocks(QuantizedWeight):
    """Rows of blocks, each with its own scales.

    Attributes:
        data: uint8 [out_features, bytes of a row].
        layout: one of `LAYOUTS`.
        input_bits: to which compiled products on a CPU round inputs, in groups of 32; others keep their type.
    """

    kind = "gguf"

    def __init__(
        self, data: Tensor, layout: str, *, dtype: torch.dtype = torch.float32, input_bits: InputBits = FINE
    ) -> None:
        """
        Raises:
            ValueError: there is no such layout, or rows are not of whole blocks.
        """
        require(layout in LAYOUTS, f"there is no layout {layout}; there are {', '.join(LAYOUTS)}")
        require(data.ndim == 2 and data.dtype == torch.uint8, "data must be uint8 [out, bytes]")
        block = LAYOUTS[layout]
        require(data.shape[1] % block.size == 0, f"rows must be multiples of {block.size} bytes")
        self.data, self.layout, self.input_bits = data.contiguous(), layout, input_bits
        self.shape, self.dtype = (data.shape[0], data.shape[1] // block.size * block.weights), dtype

    @property
    def outlines(self) -> tuple[Outline, ...]:
        return (blocks_outline(self.layout, *self.shape),)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.data.device)
        for place, fields in self.slabs():
            result[place] = fields.weights()
        return result

    def slabs(self) -> Iterator[tuple[slice, Fields]]:
        """Some rows after the other: which they are, and their fields, of which all tensors have one row for each."""
        block, step = LAYOUTS[self.layout], max(1, SLAB_WEIGHTS // max(1, self.shape[1]))
        for begin in range(0, self.shape[0], step):
            data = self.data[begin : begin + step]
            yield slice(begin, begin + len(data)), block.read(data.view(-1, block.size)).in_rows(len(data))

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        require_same(parts, "layout", "input_bits")
        return parts[0]._with(torch.cat([part.data for part in parts]))

    def rows(self, index: Tensor | slice) -> Self:
        return self._with(self.data[index])

    def _with(self, data: Tensor) -> Self:
        return type(self)(data, self.layout, dtype=self.dtype, input_bits=self.input_bits)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,)


def mx_of(weight: GgufBlocks) -> Mx:
    """MXFP4 as the same weight in the layout of the OCP MX specification; there an exponent of 255 is no number."""
    require(weight.layout == "MXFP4", f"{weight.layout} is not MXFP4")
    blocks = weight.data.view(weight.shape[0], -1, LAYOUTS["MXFP4"].size)
    codes = unpack_nibbles(blocks[..., 1:].flatten(0, 1), 16).view(weight.shape)
    return Mx(codes[:, ::2] | codes[:, 1::2] << 4, blocks[..., 0], "fp4_e2m1", dtype=weight.dtype)


def blocks_outline(layout: str, rows: int, columns: int) -> Outline:
    """Outline of a weight in such blocks, with the codes that products use."""
    code, group, offsets = _form(layout)
    return Outline(code, rows, columns, group, offsets=offsets, row_bytes=columns * PACKED_BYTES.get(layout, 0) // 256)


@functools.cache
def _form(layout: str) -> tuple[Code, int, bool]:
    """Codes, weights of a group, and whether there are offsets."""
    block = LAYOUTS[layout]
    fields = block.read(torch.zeros(1, block.size, dtype=torch.uint8))
    group = block.weights // fields.scale.shape[1]
    if layout == "MXFP4":
        return "mxfp4", group, False
    if fields.table is None:
        return "int8", group, fields.offset is not None
    return "int4" if fields.table == counting_from(fields.table[0]) else "table4", group, fields.offset is not None


class Layout(NamedTuple):
    """One type of blocks."""

    weights: int
    size: int
    """Bytes of a block."""
    read: Callable[[Tensor], Fields]
    """Reads blocks uint8 [blocks, size]."""


LAYOUTS = {
    "Q4_0": Layout(32, 18, gguf_basic.q4_0), "Q4_1": Layout(32, 20, gguf_basic.q4_1),
    "Q5_0": Layout(32, 22, gguf_basic.q5_0), "Q5_1": Layout(32, 24, gguf_basic.q5_1),
    "Q8_0": Layout(32, 34, gguf_basic.q8_0), "Q2_K": Layout(256, 84, gguf_k_quants.q2_k),
    "Q3_K": Layout(256, 110, gguf_k_quants.q3_k), "Q4_K": Layout(256, 144, gguf_k_quants.q4_k),
    "Q5_K": Layout(256, 176, gguf_k_quants.q5_k), "Q6_K": Layout(256, 210, gguf_k_quants.q6_k),
    "IQ4_NL": Layout(32, 18, gguf_basic.iq4_nl), "IQ4_XS": Layout(256, 136, gguf_k_quants.iq4_xs),
    "MXFP4": Layout(32, 17, gguf_basic.mxfp4), "TQ1_0": Layout(256, 54, gguf_basic.tq1_0),
    "TQ2_0": Layout(256, 66, gguf_basic.tq2_0), "IQ3_XXS": Layout(256, 98, gguf_i_quants.iq3_xxs),
    "IQ3_S": Layout(256, 110, gguf_i_quants.iq3_s), "IQ2_XXS": Layout(256, 66, gguf_i_quants.iq2_xxs),
    "IQ2_XS": Layout(256, 74, gguf_i_quants.iq2_xs), "IQ2_S": Layout(256, 82, gguf_i_quants.iq2_s),
    "IQ1_S": Layout(256, 50, gguf_i_quants.iq1_s), "IQ1_M": Layout(256, 56, gguf_i_quants.iq1_m),
}  # fmt: skip
PACKED_BYTES = {
    "Q4_0": 144, "Q4_1": 160, "Q5_0": 176, "Q5_1": 192, "Q8_0": 272, "IQ4_NL": 144, "Q4_K": 148, "Q5_K": 180,
    "Q6_K": 210, "IQ4_XS": 138,
}  # fmt: skip
"""Of 256 weights in the types that a CPU's products read in units of 16 rows (`cpu_blocks`): those of the file, or with
scales of six bits in a byte each."""
