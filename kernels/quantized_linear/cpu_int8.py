"""Products with `Int8Channel` weights on a CPU: compiled ones, and torch's without compiled code.

The weight is in memory once, in panels. For few rows the compiled product reads it at the speed of the memory, and it
quantizes the inputs in the same call. With AVX2 it takes any number of rows; operations before and after a product then
need no further pass over its inputs and outputs. The sums of a group of inputs are exact, and the totals of the groups
are added in one order, so a row's result depends neither on the number of rows nor on the path.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import cpp
from troupellm.kernels.act_quant.reference import quantize_groups
from troupellm.kernels.common.huge_pages import prefer_huge_pages
from troupellm.kernels.cpp import guard
from troupellm.kernels.cpp.checks import require, rows_of
from troupellm.kernels.quantized_linear.cpu_rows import CppRows, Functions
from troupellm.kernels.quantized_linear.int8 import INPUT_GROUP, Int8Channel, total_of_groups

FEW_ROWS = 32
"""Most rows of compiled products without AVX2: beyond, torch is as fast."""
EXACT_DEPTH = 1024
"""Number of inputs whose eight-bit products float32 adds without rounding: 127 * 128 * 1024 is below 2^24."""
AT_ONCE = 2**20
"""Numbers of a result that torch computes together: each takes about a hundred bytes meanwhile."""
PANEL = 64
"""Outputs that lie side by side."""
INPUT_BLOCK = 64
LANES = 16


class Limits(NamedTuple):
    """Of the compiled products on this machine."""

    many_rows: int
    """Most rows of a product; 0 without AVX2."""
    zero: int
    """The offset of the stored numbers of a weight."""


class Int8FewRows(CppRows):
    """A weight in the form of compiled code: `Int8Weight` of parts.h."""

    __slots__ = (
        "_functions",
        "_held",
        "_numbers",
        "_pointer",
        "gates",
        "in_features",
        "most_rows",
        "out_features",
        "part",
    )

    def __init__(
        self, functions: Functions, panels: Tensor, panel: int, weight: Int8Channel, bias: Tensor | None
    ) -> None:
        """
        Args:
            panels: the values as `in_panels` lays them.

        Raises:
            RefusedCall: less memory than the weight takes, or a bias of another size.
        """
        self.out_features, self.in_features = weight.shape
        depth = rounded_up(self.in_features, INPUT_BLOCK)
        whole = rounded_up(self.out_features, panel)
        require(panels.nbytes == whole * depth, f"a weight of {panels.nbytes} bytes, not {whole * depth}")
        self.gates = self.out_features % (2 * LANES) == 0
        self.most_rows = limits().many_rows or FEW_ROWS
        scale = padded(weight.scale, whole)
        bias = None if bias is None else padded(bias.float(), whole)
        self._functions, self._held = functions, (panels, scale, bias)
        self._numbers = np.array(
            [panels.data_ptr(), panel, depth, self.in_features, self.out_features, scale.data_ptr(),
             0 if bias is None else bias.data_ptr()],
            dtype=np.int64,
        )  # fmt: skip
        self._pointer = self._numbers.ctypes.data
        self.part: tuple[int, int] | None = (1, self._pointer)

    def values(self) -> Tensor:
        """The values that the panels hold: int8 [out, in]; a copy."""
        return from_panels(self._held[0], self.out_features, self.in_features)


class Int8Product:
    """An `Int8Channel` weight on a CPU, ready for many products."""

    def __init__(self, weight: Int8Channel, bias: Tensor | None) -> None:
        self._scale, self._bias = weight.scale, None if bias is None else bias.float()
        self._values: Tensor | None = weight.values
        self._compiled: Int8FewRows | None = None
        if (functions := compiled()) is not None:
            panels = in_panels(weight.values, PANEL)
            prefer_huge_pages(panels.data_ptr(), panels.nbytes)
            self._compiled, self._values = Int8FewRows(functions, panels, PANEL, weight, bias), None
        self.native = self._compiled if weight.dtype == torch.float32 else None

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""
        return rows

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features], the type of `x`."""
        rows, few = x.shape[0], self._compiled
        if rows == 0:
            return x.new_empty(0, self._scale.shape[0])
        if few is not None and rows <= few.most_rows:
            floats = x.float()
            return few.linear(floats if floats.stride(-1) == 1 else floats.contiguous(), None, 0.0, None, 1.0).to(
                x.dtype
            )
        weight = few.values() if self._values is None and few is not None else self._values
        assert weight is not None
        parts = torch.split(x, max(1, AT_ONCE // weight.shape[0]))
        return torch.cat([self._by_torch(part, weight) for part in parts])

    def _by_torch(self, x: Tensor, weight: Tensor) -> Tensor:
        """weight: int8 [out_features, in_features]."""
        values, input_scale = quantize_groups(x, INPUT_GROUP)
        pairs = zip(torch.split(values, INPUT_GROUP, 1), torch.split(weight, INPUT_GROUP, 1), strict=True)
        product = total_of_groups((whole_sums(*pair) for pair in pairs), input_scale).mul_(self._scale)
        return (product if self._bias is None else product.add_(self._bias)).to(x.dtype)


def whole_sums(values: Tensor, weight: Tensor) -> Tensor:
    """Products of int8 [rows, in] and int8 [out, in]: int32 [rows, out], exact."""
    if int_mm_is_exact():
        return torch._int_mm(values, weight.t())
    require(values.shape[1] <= EXACT_DEPTH, f"{values.shape[1]} inputs of a group, not up to {EXACT_DEPTH}")
    return (values.float() @ weight.float().t()).int()


@functools.cache
def int_mm_is_exact() -> bool:
    """True if torch's own product is exact. On processors with AVX2 and without VNNI, oneDNN adds pairs in 16 bits,
    which silently cuts off large ones."""
    weight, x = _small_case()
    values, _ = quantize_groups(x, INPUT_GROUP)
    wanted = values.double() @ weight.values.double().t()
    return torch.equal(torch._int_mm(values, weight.values.t()).double(), wanted)


def quantized_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_groups`, compiled where that is possible: int8 [rows, size] and float32 [rows, groups]."""
    quantize = row_quantizer()
    if quantize is None:
        return quantize_groups(x, INPUT_GROUP)
    x = x.float()
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, size = x.shape
    stride = rows_of("x", x, size)[1]
    values = guard.empty("values", rows, size, dtype=torch.int8)
    scale = guard.empty("scales", rows, -(-size // INPUT_GROUP))
    quantize(x.data_ptr(), stride, rows, size, values.data_ptr(), size, scale.data_ptr(), torch.get_num_threads())
    return values, scale


def in_panels(values: Tensor, panel: int) -> Tensor:
    """Values [out, in] as the compiled product reads them: [panels, in / 4, panel, 4], padded with zeros. Processors
    with VNNI take them without a sign, 128 higher, which flips their highest bit."""
    outs, depth = values.shape
    whole = values.new_zeros(rounded_up(outs, panel), rounded_up(depth, INPUT_BLOCK))
    whole[:outs, :depth] = values
    panels = whole.view(-1, panel, whole.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return panels.bitwise_xor_(-128) if limits().zero else panels


def from_panels(panels: Tensor, outs: int, depth: int) -> Tensor:
    """The values [out, in] that `in_panels` laid; a copy."""
    _, fours, panel, _ = panels.shape
    values = panels.transpose(1, 2).reshape(-1, panel, 4 * fours).flatten(0, 1)[:outs, :depth]
    return values ^ -128 if limits().zero else values


def rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def padded(vector: Tensor, size: int) -> Tensor:
    """A vector with zeros behind it."""
    return functional.pad(vector, (0, size - vector.shape[0]))


@functools.cache
def row_quantizer() -> cpp.Function | None:
    """Compiled `quantize_groups`, or None where it is not there or wrong."""
    library = cpp.load()
    if library is None:
        return None
    function = library.function("int8_quantize", "piiipipi")
    x = torch.randn(3, 2 * INPUT_GROUP + 33, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    values, scale = quantize_groups(x, INPUT_GROUP)
    got, got_scale = torch.empty_like(values), torch.empty_like(scale)
    function(
        x.data_ptr(), x.stride(0), *x.shape, got.data_ptr(), x.shape[1], got_scale.data_ptr(), torch.get_num_threads()
    )
    return cpp.checked(function, torch.equal(got, values) and torch.equal(got_scale, scale), "int8 inputs")


@functools.cache
def limits() -> Limits:
    """The limits of compiled products of any weight."""
    library = cpp.load()
    numbers = np.zeros(3, dtype=np.int64)
    if library is not None:
        library.function("int8_limits", "p")(numbers.ctypes.data)
        require(numbers[2] == INPUT_GROUP, f"compiled groups of {numbers[2]} inputs, not {INPUT_GROUP}")
    return Limits(int(numbers[0]), int(numbers[1]))


@functools.cache
def compiled() -> Functions | None:
    """Compiled products of few rows, or None where they are not there or wrong."""
    library = cpp.load()
    if library is None:
        return None
    functions = Functions(
        library.function("int8_linear", "ppiipdidpii"), library.function("int8_linear_gated", "ppiipdipii")
    )
    # Without tiles; with one of rows, and with more; with so many that they are dealt out.
    right = all(_agrees(functions, rows) for rows in (5, 9, 40, 150))
    return cpp.checked(functions, right, "int8 products")


def _agrees(functions: Functions, rows: int) -> bool:
    generator = torch.Generator().manual_seed(1)
    depth = INPUT_GROUP + 33
    values = torch.randint(-128, 128, (96, depth), generator=generator, dtype=torch.int8)
    weight = Int8Channel(values, torch.rand(96, generator=generator, dtype=torch.float32) / 1000)
    x, bias, residual = (
        torch.randn(shape, generator=generator, dtype=torch.float32) for shape in ((rows, depth), (96,), (rows, 96))
    )
    norm = torch.rand(depth, generator=generator, dtype=torch.float32)
    few = Int8FewRows(functions, in_panels(values, PANEL), PANEL, weight, bias)
    few.most_rows = max(few.most_rows, rows)
    plain = weight.product(x, bias)
    normed = weight.product(functional.rms_norm(x, (depth,), norm, 1e-5), bias)
    gate, up = normed.chunk(2, dim=-1)
    found = (
        (few.linear(x, None, 0.0, residual.clone(), 0.5), residual + 0.5 * plain, 1e-4),
        # A norm that differs in its last bit moves some input to the next of its 255 values.
        (few.linear(x, norm, 1e-5, None, 1.0), normed, 0.02),
        (few.gated(x, norm, 1e-5, "silu"), functional.silu(gate) * up, 0.02),
        (few.gated(x, norm, 1e-5, "gelu_tanh"), functional.gelu(gate, approximate="tanh") * up, 0.02),
    )
    close = all(torch.allclose(got, expected, atol=tolerance) for got, expected, tolerance in found)
    return close and torch.equal(few.linear(x, None, 0.0, None, 1.0), plain)


def _small_case() -> tuple[Int8Channel, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (17, 33), generator=generator, dtype=torch.int8)
    weight = Int8Channel(values, torch.rand(17, generator=generator, dtype=torch.float32))
    return weight, torch.randn(3, 33, generator=generator, dtype=torch.float32)
