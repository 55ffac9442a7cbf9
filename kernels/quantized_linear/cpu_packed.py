"""Products with weights in codes on a CPU, float32: compiled ones for few rows, decoded pieces of the weight for many.

The codes stay in memory, and nothing else of the weight. Few rows take one walk through them; for many, some hundreds
of outputs at a time are decoded into a buffer, which torch then multiplies with.
"""

import functools
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import cpp
from troupellm.kernels.common.huge_pages import prefer_huge_pages
from troupellm.kernels.cpp import guard
from troupellm.kernels.cpp.checks import check, require
from troupellm.kernels.quantized_linear.cpu_rows import CppRows, Functions
from troupellm.kernels.quantized_linear.grouped import Int4Group, Int8WeightOnly
from troupellm.kernels.quantized_linear.packed_weights import UNIT, PackedWeight, packed_weight

MOST_ROWS = 16
PIECE_UNITS = 32
"""Number of units of 16 outputs that are decoded together for many rows."""
KINDS = {"int8": 0, "table": 1, "fp8": 2}


@dataclass(frozen=True, slots=True)
class PackedFunctions(Functions):
    decode: cpp.Function


class PackedProduct(CppRows):
    """A weight in codes, ready for many products: few rows by itself, as `FewRows` has it, many as `FastProduct`."""

    most_rows = MOST_ROWS
    part: tuple[int, int] | None = None
    _functions: PackedFunctions

    def __init__(
        self, functions: PackedFunctions, weight: PackedWeight, shape: tuple[int, int], bias: Tensor | None
    ) -> None:
        """
        Raises:
            RefusedCall: codes, scales or a bias of another type or size than the shape needs.
        """
        self.out_features, self.in_features = shape
        check_packed(weight, shape, bias)
        self._functions, self._order = functions, weight.order
        self.gates = self.out_features % (2 * UNIT) == 0
        self._bias = None if bias is None else bias.float()
        self._units = -(-self.out_features // UNIT)
        codes, scale = in_units(weight.codes), in_units(weight.scale)
        offset = None if weight.offset is None else in_units(weight.offset)
        table = torch.zeros(UNIT, dtype=torch.int8) if weight.table is None else weight.table
        padded = None if bias is None else functional.pad(bias.float(), (0, self._units * UNIT - self.out_features))
        prefer_huge_pages(codes.data_ptr(), codes.nbytes)
        self._held = (codes, scale, offset, table, padded)
        self._numbers = np.array(
            [codes.data_ptr(), KINDS[weight.kind], self.in_features, scale.shape[1], self.out_features,
             table.data_ptr(), scale.data_ptr(),
             *(0 if vector is None else vector.data_ptr() for vector in (offset, padded))],
            dtype=np.int64,
        )  # fmt: skip
        self._pointer = self._numbers.ctypes.data

    @property
    def native(self) -> "PackedProduct | None":
        """Itself, unless inputs must be put in another order first, which nothing can be fused with."""
        return self if self._order is None else None

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""
        return rows

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features]."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        if x.shape[0] <= MOST_ROWS:
            return self.linear(x if x.stride(-1) == 1 else x.contiguous(), None, 0.0, None, 1.0)
        out, threads = x.new_empty(x.shape[0], self.out_features), torch.get_num_threads()
        piece = guard.empty("out", self.in_features, UNIT * min(PIECE_UNITS, self._units))
        for unit in range(0, self._units, PIECE_UNITS):
            count = min(PIECE_UNITS, self._units - unit)
            begin, end = unit * UNIT, min(self.out_features, (unit + count) * UNIT)
            decoded = piece.view(-1)[: self.in_features * count * UNIT].view(self.in_features, count * UNIT)
            self._functions.decode(self._pointer, unit, count, decoded.data_ptr(), threads)
            product = x @ decoded[:, : end - begin]
            out[:, begin:end] = product if self._bias is None else product + self._bias[begin:end]
        return out


def check_packed(weight: PackedWeight, shape: tuple[int, int], bias: Tensor | None) -> None:
    """
    Raises:
        RefusedCall: see `PackedProduct`.
    """
    outs, depth = shape
    groups = weight.scale.shape[1]
    check("codes", weight.codes.contiguous(), torch.uint8, outs, depth // 2 if weight.kind == "table" else depth)
    fits = groups > 0 and depth % groups == 0 and depth // groups % 2 == 0
    require(fits, f"{groups} groups of {depth} inputs, which have to be of equally and evenly many")
    for scale in (weight.scale, weight.offset):
        if scale is not None:
            check("scale", scale.contiguous(), torch.float32, outs, groups)
    if weight.kind == "table" or weight.table is not None:
        require(weight.table is not None, "codes of four bits have a table")
        check("table", cast(Tensor, weight.table), torch.int8, UNIT)
    require(bias is None or bias.shape == (outs,), f"a bias of another size than {outs}")


def in_units(rows: Tensor) -> Tensor:
    """[out_features, n] as compiled products read it: [units, n, 16], padded with zeros."""
    missing = -rows.shape[0] % UNIT
    return functional.pad(rows, (0, 0, 0, missing)).view(-1, UNIT, rows.shape[1]).transpose(1, 2).contiguous()


def packed_product(codes: PackedWeight, shape: tuple[int, int], bias: Tensor | None) -> PackedProduct | None:
    """The product with a float32 weight in codes; None where there is no compiled code."""
    functions = load()
    return None if functions is None else PackedProduct(functions, codes, shape, bias)


@functools.cache
def load() -> PackedFunctions | None:
    """The compiled functions, or None where they are not there or wrong."""
    library = cpp.load()
    if library is None:
        return None
    functions = PackedFunctions(
        library.function("coded_linear", "ppiipdidpii"),
        library.function("coded_linear_gated", "ppiipdipii"),
        library.function("coded_decode", "piipi"),
    )
    return cpp.checked(functions, _agrees(functions), "products with codes")


def _agrees(functions: PackedFunctions) -> bool:
    generator = torch.Generator().manual_seed(2)
    plain, bias = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in ((96, 64), (96,)))
    norm = torch.rand(64, generator=generator, dtype=torch.float32)
    for weight in (Int4Group.quantize(plain, 32), Int8WeightOnly.quantize(plain)):
        codes = packed_weight(weight)
        if codes is None:
            return False
        product = PackedProduct(functions, codes, weight.shape, bias)
        for rows in (1, 7, MOST_ROWS + 1):
            x = torch.randn(rows, 64, generator=generator, dtype=torch.float32)
            normed = weight.product(functional.rms_norm(x, (64,), norm, 1e-5), bias)
            gate, up = normed.chunk(2, dim=-1)
            found = (
                (product(x), weight.product(x, bias)),
                (product.linear(x, norm, 1e-5, torch.ones_like(normed), 0.5), 1 + 0.5 * normed),
                (product.gated(x, norm, 1e-5, "silu"), functional.silu(gate) * up),
            )
            if not all(torch.allclose(got, expected, atol=1e-3) for got, expected in found):
                return False
    return True
