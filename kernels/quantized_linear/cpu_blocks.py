"""Products with weights in the blocks of GGUF files on a CPU, float32: compiled, for any number of rows.

A weight is packed once, into units of 16 outputs that take as much memory as the file's blocks. Inputs are rounded to
whole numbers in groups of 32, see `Rounding`; a group's products are summed exactly, and each group's sum is added to
the output in order. So a row's result depends neither on the other rows nor on the number of threads, to the bit.

The design (units of outputs, sums of whole numbers beside sums of inputs) is that of ggml's own products, which round
inputs too.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import cpp
from troupellm.kernels.common.huge_pages import prefer_huge_pages
from troupellm.kernels.cpp import guard
from troupellm.kernels.cpp.checks import check, require
from troupellm.kernels.quantized_linear.cpu_rows import CppRows, Functions
from troupellm.kernels.quantized_linear.gguf import FINE, LAYOUTS, GgufBlocks
from troupellm.kernels.quantized_linear.packed_weights import PackedWeight

UNIT, GROUP, INT4_BLOCK = 16, 32, 128
ANY_ROWS = 2**31 - 1


class Packed(NamedTuple):
    """A type of blocks in the layout of block_types.h."""

    number: int
    lines: int
    """Bytes of 32 codes of 16 outputs, by 64."""
    groups: int
    """Groups of 32 inputs in a block of scales."""
    scales: int
    """Bytes of such a block for one output."""
    start: int = -1
    """Number of the offset of its codes; -1 is none."""


PACKED = {
    "Q4_0": Packed(0, 4, 1, 2, 0), "Q4_1": Packed(1, 4, 1, 4), "Q5_0": Packed(2, 5, 1, 2, 1),
    "Q5_1": Packed(3, 5, 1, 4), "Q8_0": Packed(4, 8, 1, 2, 2), "IQ4_NL": Packed(5, 4, 1, 2, 2),
    "Q4_K": Packed(6, 4, 8, 20), "Q5_K": Packed(7, 5, 8, 20), "Q6_K": Packed(8, 6, 8, 18, 3),
    "IQ4_XS": Packed(9, 4, 8, 10, 2), "I4_32": Packed(10, 4, 1, 8), "I4_128": Packed(11, 4, 4, 8),
}  # fmt: skip
STORED = {name: (layout.weights, layout.size) for name, layout in LAYOUTS.items()} | {
    "I4_32": (32, 24),
    "I4_128": (128, 72),
}
"""Weights and bytes of a block as it comes. Those of I4 are a scale and a minimum in float32, then codes of four bits
with the even input in the low half of a byte: w = code * scale + minimum."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight, or a part of one.

    Attributes:
        layout: one of `PACKED`.
        data: uint8 [out_features, bytes of a row].
    """

    layout: str
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """out_features and in_features."""
        weights, size = STORED[self.layout]
        return self.data.shape[0], self.data.shape[1] // size * weights


@dataclass(frozen=True, slots=True)
class BlockFunctions(Functions):
    pack: cpp.Function
    rows: cpp.Function


class BlockProduct(CppRows):
    """Weights in blocks, one below the other, ready for products of any number of rows."""

    most_rows = ANY_ROWS
    _functions: BlockFunctions

    def __init__(self, functions: BlockFunctions, parts: Sequence[Blocks], bias: Tensor | None, *, fine: bool) -> None:
        """
        Args:
            parts: all but the last one of a multiple of 16 outputs.
            fine: inputs have fifteen bits instead of eight.

        Raises:
            RefusedCall: parts of different inputs or of a type that has no products, or a bias of another size.
        """
        for part in parts:
            require(part.layout in PACKED, f"{part.layout} is none of {', '.join(PACKED)}")
        self.in_features = parts[0].shape[1]
        self.out_features = sum(part.shape[0] for part in parts)
        self.gates = self.out_features % (2 * UNIT) == 0
        self._functions = functions
        require(bias is None or bias.shape == (self.out_features,), f"a bias of another size than {self.out_features}")
        for part in parts:
            require(part.shape[1] == self.in_features, f"parts of {part.shape[1]} and {self.in_features} inputs")
        for part in parts[:-1]:
            require(part.shape[0] % UNIT == 0, f"a part of {part.shape[0]} outputs before another one")
        memory = [pack_blocks(functions, part) for part in parts]
        units = [-(-part.shape[0] // UNIT) for part in parts]
        numbers = [
            [codes.data_ptr(), scales.data_ptr(), PACKED[part.layout].number, first, count]
            for part, (codes, scales), first, count in zip(
                parts, memory, accumulate(units, initial=0), units, strict=False
            )
        ]
        table = np.array(numbers, dtype=np.int64)
        whole = sum(units) * UNIT
        padded = None if bias is None else functional.pad(bias.float(), (0, whole - self.out_features)).contiguous()
        starts = sum({1 << PACKED[part.layout].start for part in parts if PACKED[part.layout].start >= 0})
        self._held = (memory, table, padded)
        self._numbers = np.array(
            [
                table.ctypes.data,
                len(parts),
                self.in_features,
                self.out_features,
                starts,
                int(fine),
                0 if padded is None else padded.data_ptr(),
            ],
            dtype=np.int64,
        )
        self._pointer = self._numbers.ctypes.data
        self.part = (2, self._pointer)

    @property
    def native(self) -> "BlockProduct":
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(codes.nbytes + scales.nbytes for codes, scales in self._held[0])

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""
        return rows

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features]."""
        return self.linear(x if x.stride(-1) == 1 else x.contiguous(), None, 0.0, None, 1.0)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the weight, float32 [n, in_features], to the bit those of `dequantize`.

        Args:
            index: int64 [n].

        Raises:
            RefusedCall: there is no such row.
        """
        index = index.contiguous()
        check("index", index, torch.int64, index.numel())
        out = guard.empty("out", index.numel(), self.in_features)
        self._functions.rows(self._pointer, index.data_ptr(), index.numel(), out.data_ptr(), torch.get_num_threads())
        return out


def pack_blocks(functions: BlockFunctions, weight: Blocks) -> tuple[Tensor, Tensor]:
    """Codes and scales in the layout of products."""
    packed, (outs, depth) = PACKED[weight.layout], weight.shape
    units, groups = -(-outs // UNIT), depth // GROUP
    weights, size = STORED[weight.layout]
    check("blocks", weight.data, torch.uint8, outs, depth // weights * size)
    codes = guard.empty("codes", units * groups * packed.lines * 64, dtype=torch.uint8)
    scales = guard.empty("scales", units * (groups // packed.groups) * packed.scales * UNIT, dtype=torch.uint8)
    prefer_huge_pages(codes.data_ptr(), codes.nbytes)
    functions.pack(
        packed.number, weight.data.data_ptr(), outs, depth, codes.data_ptr(), scales.data_ptr(), torch.get_num_threads()
    )
    return codes, scales


def block_product(parts: Sequence[GgufBlocks], bias: Tensor | None) -> BlockProduct | None:
    """The product with these weights, one below the other; None without compiled code, or where a part has another type
    or ends within a unit."""
    functions = load()
    whole = all(part.shape[0] % UNIT == 0 for part in parts[:-1])
    if functions is None or not whole or not all(part.layout in PACKED for part in parts):
        return None
    blocks = [Blocks(part.layout, part.data) for part in parts]
    return BlockProduct(functions, blocks, bias, fine=parts[0].input_bits == FINE)


def int4_product(weight: PackedWeight, bias: Tensor | None) -> BlockProduct | None:
    """The product with a weight in codes of four bits that count up, on inputs of fifteen bits; None without compiled
    code, or where groups are no multiples of 32 inputs or inputs have an order."""
    functions, (outs, groups) = load(), weight.scale.shape
    depth = 2 * weight.codes.shape[1]
    size = depth // groups
    counts = weight.table is not None and torch.equal(weight.table, weight.base + torch.arange(16, dtype=torch.int8))
    if functions is None or not counts or weight.order is not None or size % GROUP:
        return None
    layout, block = ("I4_32", GROUP) if size % INT4_BLOCK else ("I4_128", INT4_BLOCK)
    minimum = weight.base * weight.scale
    minimum = minimum if weight.offset is None else minimum + weight.offset
    numbers = torch.stack((weight.scale, minimum), dim=-1).repeat_interleave(size // block, dim=1)
    codes = weight.codes.reshape(outs, depth // block, block // 2)
    data = torch.cat((numbers.view(torch.uint8), codes), dim=-1).flatten(1)
    return BlockProduct(functions, (Blocks(layout, data),), bias, fine=True)


@functools.cache
def load() -> BlockFunctions | None:
    """The compiled functions, or None where they are not there or wrong."""
    library = cpp.load()
    if library is None:
        return None
    functions = BlockFunctions(
        library.function("block_linear", "ppiipdidpii"),
        library.function("block_linear_gated", "ppiipdipii"),
        library.function("block_pack", "ipiippi"),
        library.function("block_rows", "ppipi"),
    )
    return cpp.checked(functions, _agrees(functions), "products with blocks")


def _agrees(functions: BlockFunctions) -> bool:
    """A few rows and many with every type of GGUF files, of codes at random and scales near one."""
    generator = torch.Generator().manual_seed(2)
    for layout in HALVES:
        size = LAYOUTS[layout].size * (256 // LAYOUTS[layout].weights)
        data = torch.randint(0, 256, (32, size), generator=generator, dtype=torch.uint8)
        for at in HALVES[layout]:
            blocks = data.view(-1, LAYOUTS[layout].size)
            blocks[:, at + 1] = blocks[:, at + 1] & 0x83 | 0x24  # exponents of float16 near 2^-6
        plain = GgufBlocks(data, layout).dequantize()
        for fine, near in ((False, 0.02), (True, 1e-4)):
            product = BlockProduct(functions, (Blocks(layout, data),), None, fine=fine)
            if not torch.equal(product.rows(torch.arange(32)), plain):
                return False
            for rows in (1, 5, 21):
                x = torch.randn(rows, 256, generator=generator, dtype=torch.float32)
                wanted = x @ plain.t()
                if (product(x) - wanted).abs().max() > near * wanted.abs().max():
                    return False
    return True


HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where blocks have floats of 16 bits."""
