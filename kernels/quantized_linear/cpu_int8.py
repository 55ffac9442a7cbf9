"""Products with `Int8Channel` weights on a CPU: compiled ones, and oneDNN's for many rows without VNNI or tiles.

The weight is in memory once, as oneDNN packs it. For few rows the compiled product reads it at the speed of the memory,
where oneDNN's own takes up to three times as long, and quantizes the inputs in the same call. With AVX-512's products
of eight bits (VNNI) or the processor's tiles (AMX) it takes any number of rows. There, operations before and after a
product need no further pass over its inputs and outputs. All products are exact, so a row's result depends neither on
the number of rows nor on the path.
"""

import ctypes
import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import cpp
from troupellm.kernels.act_quant.reference import quantize_rows
from troupellm.kernels.common.huge_pages import prefer_huge_pages
from troupellm.kernels.common.onednn import padded_rows
from troupellm.kernels.cpp import guard
from troupellm.kernels.cpp.checks import require, rows_of
from troupellm.kernels.quantized_linear.cpu_rows import CppRows, Functions
from troupellm.kernels.quantized_linear.int8 import Int8Channel

FEW_ROWS = 32
"""Most rows of compiled products without VNNI or tiles: beyond, oneDNN is as fast."""
FEW_WIDE_ROWS, WIDE = 16, 16384
"""The same for weights with at least this many outputs, such as a head: oneDNN writes long rows faster."""
EXACT_DEPTH = 1024
"""Number of inputs whose eight-bit products float32 adds without rounding: 127 * 128 * 1024 is below 2^24."""
ZERO = 128
"""The zero of oneDNN's unsigned inputs."""
PANELS = (64, 48, 32, 16)
"""Outputs that are contiguous in oneDNN's layouts, where the compiled product can read them."""
INPUT_BLOCK = 64
LANES = 16


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
        self,
        functions: Functions,
        values: tuple[int, int],
        panel: int,
        weight: Int8Channel,
        bias: Tensor | None,
        held: Tensor,
    ) -> None:
        """
        Args:
            values: their address, in panels, and how many bytes are there.
            held: the memory that they lie in.

        Raises:
            RefusedCall: less memory than the weight takes, or a bias of another size.
        """
        self.out_features, self.in_features = weight.shape
        depth = rounded_up(self.in_features, INPUT_BLOCK)
        whole = rounded_up(self.out_features, panel)
        require(values[1] >= whole * depth, f"a weight of {values[1]} bytes, not {whole * depth}")
        self.gates = self.out_features % (2 * LANES) == 0
        self.most_rows = many_rows() or (FEW_ROWS if self.out_features < WIDE else FEW_WIDE_ROWS)
        sums, scale = padded(weight.values.sum(dim=1, dtype=torch.int32), whole), padded(weight.scale, whole)
        bias = None if bias is None else padded(bias.float(), whole)
        self._functions, self._held = functions, (held, sums, scale, bias)
        self._numbers = np.array(
            [values[0], panel, depth, self.in_features, self.out_features, sums.data_ptr(),
             scale.data_ptr(), 0 if bias is None else bias.data_ptr()],
            dtype=np.int64,
        )  # fmt: skip
        self._pointer = self._numbers.ctypes.data
        self.part: tuple[int, int] | None = (1, self._pointer)


class Int8Product:
    """An `Int8Channel` weight on a CPU, ready for many products."""

    def __init__(self, weight: Int8Channel, bias: Tensor | None) -> None:
        self._scale, self._bias = weight.scale, None if bias is None else bias.float()
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int8)
        self._values = weight.values
        nothing = torch.empty(0, dtype=torch.int8)  # a part of the values would keep all of them in memory
        self._packed: Tensor | None = None
        self.native: Int8FewRows | None = None
        functions = compiled() if weight.dtype == torch.float32 else None
        if not onednn_works():
            if functions is not None:
                panels, self._values = in_panels(weight.values, PANELS[0]), nothing
                self.native = Int8FewRows(functions, memory_of(panels), PANELS[0], weight, bias, panels)
            return
        self._packed, self._values = pack(weight.values), nothing
        address, size = torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed)
        prefer_huge_pages(address, size)
        panel = 0 if functions is None else panel_of(address, size, weight.values)
        if functions is not None and panel:
            self.native = Int8FewRows(functions, (address, size), panel, weight, bias, self._packed)

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""
        if self._packed is None:
            return rows
        return rows if self.native is not None and rows <= self.native.most_rows else padded_rows(rows)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features], the type of `x`."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, self._scale.shape[0])
        if self._packed is None and self.native is not None:
            return self.native.linear(x, None, 0.0, None, 1.0)
        if self._packed is None:
            values, row_scale = quantize_rows(x)
            product = whole_sums(values, self._values).float() * self._scale
        else:
            missing = padded_rows(rows) - rows
            values, row_scale = quantize_unsigned(functional.pad(x, (0, 0, 0, missing)) if missing else x)
            product = onednn_product(values, self._packed, self._scale, self._zeros)
        product.mul_(row_scale[:, None])
        return (product if self._bias is None else product.add_(self._bias))[:rows].to(x.dtype)


def memory_of(panels: Tensor) -> tuple[int, int]:
    """The address and bytes of a tensor."""
    return panels.data_ptr(), panels.nbytes


def whole_sums(values: Tensor, weight: Tensor) -> Tensor:
    """Products of int8 [rows, in] and int8 [out, in]: int32 [rows, out], exact."""
    if int_mm_is_exact():
        return torch._int_mm(values, weight.t())
    parts = zip(*(torch.split(both, EXACT_DEPTH, 1) for both in (values, weight)), strict=True)
    return torch.stack([(some.float() @ part.float().t()).int() for some, part in parts]).sum(0, dtype=torch.int32)


@functools.cache
def int_mm_is_exact() -> bool:
    """True if torch's own product is exact. On processors with AVX2 and without VNNI, oneDNN adds pairs in 16 bits,
    which silently cuts off large ones."""
    weight, x = _small_case()
    values, _ = quantize_rows(x)
    wanted = values.double() @ weight.values.double().t()
    return torch.equal(torch._int_mm(values, weight.values.t()).double(), wanted)


def pack(values: Tensor) -> Tensor:
    """Values int8 [out, in] in oneDNN's own layout (an opaque tensor)."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values, None)
    return packed


def onednn_product(values: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """Inputs uint8 [rows, in] around 128 times a packed weight, times `scale` [out]: float32 [rows, out]."""
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        values, 1.0, ZERO, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def quantize_unsigned(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_rows`, with 128 added: uint8 [rows, size] and float32 [rows]."""
    quantize = row_quantizer()
    if quantize is None:
        values, scale = quantize_rows(x)
        return (values.to(torch.int16) + ZERO).to(torch.uint8), scale
    x = x.float()
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, size = x.shape
    stride = rows_of("x", x, size)[1]
    unsigned, scale = guard.empty("values", rows, size, dtype=torch.uint8), guard.empty("scales", rows)
    quantize(
        x.data_ptr(),
        stride,
        rows,
        size,
        unsigned.data_ptr(),
        size,
        scale.data_ptr(),
        ZERO,
        torch.get_num_threads(),
    )
    return unsigned, scale


def panel_of(address: int, size: int, values: Tensor) -> int:
    """The number of outputs that are contiguous in a packed weight; 0 if its layout is another one."""
    raw = torch.frombuffer((ctypes.c_int8 * size).from_address(address), dtype=torch.int8)
    for panel in PANELS:
        wanted = in_panels(values, panel)
        if wanted.numel() <= size and torch.equal(raw[: wanted.numel()], wanted.view(-1)):
            return panel
    return 0


def in_panels(values: Tensor, panel: int) -> Tensor:
    """Values [out, in] as the compiled product reads them: [panels, in / 4, panel, 4], padded with zeros."""
    outs, depth = values.shape
    whole = values.new_zeros(rounded_up(outs, panel), rounded_up(depth, INPUT_BLOCK))
    whole[:outs, :depth] = values
    return whole.view(-1, panel, whole.shape[1] // 4, 4).transpose(1, 2).contiguous()


def rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def padded(vector: Tensor, size: int) -> Tensor:
    """A vector with zeros behind it."""
    return functional.pad(vector, (0, size - vector.shape[0]))


@functools.cache
def onednn_works() -> bool:
    """True if torch's private operators exist and return the right result."""
    weight, x = _small_case()
    try:
        values, scale = quantize_unsigned(x)
        product = onednn_product(values, pack(weight.values), weight.scale, torch.zeros(17, dtype=torch.int8))
        torch.ops.mkldnn.data_ptr(pack(weight.values))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(product * scale[:, None], weight.product(x), rtol=1e-6)


@functools.cache
def row_quantizer() -> cpp.Function | None:
    """Compiled `quantize_unsigned`, or None where it is not there or wrong."""
    library = cpp.load()
    if library is None:
        return None
    function = library.function("int8_quantize", "piiipipii")
    _, x = _small_case()
    got, got_scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0], dtype=torch.float32)
    function(
        x.data_ptr(),
        x.stride(0),
        *x.shape,
        got.data_ptr(),
        x.shape[1],
        got_scale.data_ptr(),
        ZERO,
        torch.get_num_threads(),
    )
    values, scale = quantize_rows(x)
    right = torch.equal(got, (values.int() + ZERO).byte()) and torch.equal(got_scale, scale)
    return cpp.checked(function, right, "int8 inputs")


@functools.cache
def many_rows() -> int:
    """Most rows of compiled products of any weight; 0 without VNNI of AVX-512 and without tiles."""
    library = cpp.load()
    rows = np.zeros(1, dtype=np.int64)
    if library is not None:
        library.function("int8_many_rows", "p")(rows.ctypes.data)
    return int(rows[0])


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
    values = torch.randint(-128, 128, (96, 33), generator=generator, dtype=torch.int8)
    weight = Int8Channel(values, torch.rand(96, generator=generator, dtype=torch.float32) / 1000)
    x, bias, residual = (
        torch.randn(shape, generator=generator, dtype=torch.float32) for shape in ((rows, 33), (96,), (rows, 96))
    )
    norm = torch.rand(33, generator=generator, dtype=torch.float32)
    panels = in_panels(values, 64)
    few = Int8FewRows(functions, memory_of(panels), 64, weight, bias, panels)
    few.most_rows = max(few.most_rows, rows)
    plain = weight.product(x, bias)
    normed = weight.product(functional.rms_norm(x, (33,), norm, 1e-5), bias)
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
