"""Products with `Int8Channel` weights on a CPU: oneDNN's for many rows, and compiled ones for few.

The weight is in memory once, as oneDNN packs it. Up to 16 rows the compiled product walks through it at the speed of
the memory, where oneDNN's own takes up to three times as long, and quantizes the inputs in the same call. Both are
exact, so that a row's result depends neither on the number of rows nor on who computes it.
"""

import ctypes
import functools

import torch
from torch import Tensor

from troupellm.kernels import native
from troupellm.kernels.linear.huge_pages import prefer_huge_pages
from troupellm.kernels.linear.onednn import padded_rows
from troupellm.kernels.quantized.int8 import Int8Channel, quantize_rows

FEW_ROWS = 16
"""What compiled products may take."""
ZERO = 128
"""What oneDNN's unsigned inputs have for zero."""
PANELS = (64, 48, 32, 16)
"""Outputs that lie side by side in oneDNN's layouts, where the compiled product can read them."""
INPUT_BLOCK = 64


class Int8Product:
    """An `Int8Channel` weight on a CPU, ready for many products."""

    def __init__(self, weight: Int8Channel, bias: Tensor | None) -> None:
        outs, depth = weight.shape
        self.out_features, self.in_features = outs, depth
        self._packed: Tensor | None = None
        self._values = weight.values
        self._panel, self._address = 0, 0
        if onednn_works():
            self._packed = pack(weight.values)
            address, size = torch.ops.mkldnn.data_ptr(self._packed), torch.ops.mkldnn._nbytes(self._packed)
            prefer_huge_pages(address, size)
            if few_rows() is not None:
                self._panel, self._address = panel_of(address, size, weight.values), address
            self._values = weight.values[:0]
        whole = rounded_up(outs, self._panel or 1)
        self._padded = rounded_up(depth, INPUT_BLOCK)
        self._sums = padded(weight.values.sum(dim=1, dtype=torch.int32), whole)
        self._scale = padded(weight.scale, whole)
        self._bias = None if bias is None else padded(bias.float(), whole)
        self._zeros = torch.zeros(outs, dtype=torch.int8)

    def best_rows(self, rows: int) -> int:
        """As `kernels.linear.best_rows`."""
        return rows if self._panel and rows <= FEW_ROWS else padded_rows(rows)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] to [rows, out_features], the type of `x`."""
        inputs = x.float()
        compiled = few_rows()
        if compiled is not None and self._panel and x.shape[0] <= FEW_ROWS:
            out = torch.empty(x.shape[0], self.out_features)
            self._run(compiled, inputs if inputs.stride(-1) == 1 else inputs.contiguous(), out)
            return out.to(x.dtype)
        return self._many(inputs).to(x.dtype)

    def _run(self, compiled: native.Function, x: Tensor, out: Tensor) -> None:
        compiled(
            x.data_ptr(), x.stride(0), x.shape[0], self.in_features, None, 0, None, 0.0, self._address, self._panel,
            self._padded, self.out_features, self._sums.data_ptr(), self._scale.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(), 0, 0, out.data_ptr(), out.stride(0),
            torch.get_num_threads(),
        )  # fmt: skip

    def _many(self, x: Tensor) -> Tensor:
        rows, outs = x.shape[0], self.out_features
        if self._packed is None:
            values, row_scale = quantize_rows(x)
            product = torch._int_mm(values, self._values.t()).float() * self._scale
        else:
            missing = padded_rows(rows) - rows
            values, row_scale = quantize_unsigned(torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x)
            product = onednn_product(values, self._packed, self._scale[:outs], self._zeros)
        product.mul_(row_scale[:, None])
        return (product if self._bias is None else product.add_(self._bias[:outs]))[:rows]


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
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, size = x.shape
    unsigned, scale = torch.empty(rows, size, dtype=torch.uint8), torch.empty(rows)
    quantize(
        x.data_ptr(), x.stride(0), rows, size, unsigned.data_ptr(), size, scale.data_ptr(), ZERO,
        torch.get_num_threads(),
    )  # fmt: skip
    return unsigned, scale


def panel_of(address: int, size: int, values: Tensor) -> int:
    """How many outputs lie side by side in a packed weight; 0 where its layout is another one."""
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
    return torch.nn.functional.pad(vector, (0, size - vector.shape[0]))


@functools.cache
def onednn_works() -> bool:
    """Whether torch's private operators are there and give the right answer."""
    weight, x = _small_case()
    try:
        values, scale = quantize_unsigned(x)
        product = onednn_product(values, pack(weight.values), weight.scale, torch.zeros(17, dtype=torch.int8))
        torch.ops.mkldnn.data_ptr(pack(weight.values))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(product * scale[:, None], weight.product(x), rtol=1e-6)


@functools.cache
def row_quantizer() -> native.Function | None:
    """Compiled `quantize_unsigned`, or None where it is not there or wrong."""
    library = native.load()
    if library is None:
        return None
    function = library.function("int8_quantize", "piiipipii")
    _, x = _small_case()
    got, got_scale = torch.empty(x.shape, dtype=torch.uint8), torch.empty(x.shape[0])
    function(
        x.data_ptr(), x.stride(0), *x.shape, got.data_ptr(), x.shape[1], got_scale.data_ptr(), ZERO,
        torch.get_num_threads(),
    )  # fmt: skip
    values, scale = quantize_rows(x)
    return function if torch.equal(got, (values.int() + ZERO).byte()) and torch.equal(got_scale, scale) else None


@functools.cache
def few_rows() -> native.Function | None:
    """Compiled products of few rows, or None where they are not there or wrong."""
    library = native.load()
    if library is None:
        return None
    function = library.function("int8_linear", "piiipipd" + "piiippp" + "iipii")
    weight, x = _small_case()
    values, out = in_panels(weight.values, 16), torch.empty(x.shape[0], 17)
    sums, scale = padded(weight.values.sum(dim=1, dtype=torch.int32), 32), padded(weight.scale, 32)
    function(
        x.data_ptr(), x.stride(0), *x.shape, None, 0, None, 0.0, values.data_ptr(), 16, INPUT_BLOCK, 17,
        sums.data_ptr(), scale.data_ptr(), None, 0, 0, out.data_ptr(), 17, torch.get_num_threads(),
    )  # fmt: skip
    return function if torch.equal(out, weight.product(x)) else None


def _small_case() -> tuple[Int8Channel, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (17, 33), generator=generator, dtype=torch.int8)
    return Int8Channel(values, torch.rand(17, generator=generator)), torch.randn(3, 33, generator=generator)
