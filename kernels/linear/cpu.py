"""Products by compiled code, on the weights that oneDNN packed, so that no weight is in memory twice.

oneDNN does not document its layout, so it is verified: it must be panels of some outputs each, in which the outputs of
one input are contiguous. If it differs, or there is no compiled code, oneDNN computes few rows too.
"""

import ctypes
import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import cpp
from troupellm.kernels.cpp import checks, guard

FEW_ROWS = 64
"""From here on oneDNN is as fast, or faster: with AVX2, with AMX, or where a panel is large; measured over shapes of
models."""
MANY_ROWS = 4096
"""The same with AVX-512, if panels are small."""
ANY_ROWS = 2**31 - 1
"""The compiled code's value for no limit on the number of rows."""
PANEL_BYTES = 768 * 1024
"""Size of a small panel: three quarters of a core's own cache on servers, since rows have to fit there too."""
PANELS = (64, 48, 32, 16)
PADS = (1, 4, 16, 64)
LANES = 16
SILU, GELU_TANH = 0, 1
_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


@dataclass(frozen=True, slots=True)
class Functions:
    linear: cpp.Function
    gated: cpp.Function
    many_rows: int
    """The number of rows with which they are as fast as oneDNN, if panels are small."""
    split_rows: int
    """The same for weights that may be split, for any panels; 0 if the processor has no tiles (AMX)."""


@dataclass(frozen=True, slots=True)
class Layout:
    panel: int
    padded: int
    """in_features plus padding."""


class CppWeight:
    """A weight in the form of compiled code: `FloatWeight` of parts.h."""

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
        packed: Tensor,
        layout: Layout,
        shape: tuple[int, int],
        bias: Tensor | None,
        splits: bool,
    ) -> None:
        self.out_features, self.in_features = shape
        size = -(-self.out_features // layout.panel) * layout.panel * layout.padded
        found = torch.ops.mkldnn._nbytes(packed) // 4
        checks.require(found >= size >= layout.padded >= self.in_features, f"a weight of {found} numbers, not {size}")
        self.most_rows = most_rows(layout, functions, splits)
        """More are left to oneDNN."""
        self.gates = self.out_features % (2 * LANES) == 0
        """True if the compiled code can multiply the two halves of the outputs by each other."""
        if bias is not None:
            bias = bias.contiguous()
            checks.check("bias", bias, torch.float32, self.out_features)
        self._functions, self._held = functions, (packed, bias)
        self._numbers = np.array(
            [torch.ops.mkldnn.data_ptr(packed), layout.panel, layout.padded, self.in_features, self.out_features,
             0 if bias is None else bias.data_ptr(), splits],
            dtype=np.int64,
        )  # fmt: skip
        self._pointer = self._numbers.ctypes.data
        self.part: tuple[int, int] | None = (0, self._pointer)

    def linear(self, x: Tensor, norm: Tensor | None, eps: float, out: Tensor | None, factor: float) -> Tensor:
        """The product of `x` [rows, in], behind a norm where one is given; written to a new tensor, or added to `out`
        [rows, out] times `factor`."""
        rows, step = checks.rows_of("x", x, self.in_features)
        gain = None if norm is None else checks.address_of_norm(norm, self.in_features)
        adds, out_step, threads = out is not None, self.out_features, torch.get_num_threads()
        if out is None:
            out = guard.empty("out", rows, self.out_features)
        else:
            out_step = checks.check_rows("out", out, rows, self.out_features)
        source, target = x.data_ptr(), out.data_ptr()
        for begin, end in tiles(rows, self.most_rows):
            self._functions.linear(
                self._pointer,
                source + 4 * step * begin,
                step,
                end - begin,
                gain,
                eps,
                adds,
                factor,
                target + 4 * out_step * begin,
                out_step,
                threads,
            )
        return out

    def gated(self, x: Tensor, norm: Tensor | None, eps: float, activation: str) -> Tensor:
        """activation(first half) * second half of the product of `x` [rows, in]: [rows, out / 2]."""
        checks.require(self.gates, f"halves of {self.out_features} outputs cannot be multiplied on the way")
        rows, step = checks.rows_of("x", x, self.in_features)
        gain = None if norm is None else checks.address_of_norm(norm, self.in_features)
        size, threads = self.out_features // 2, torch.get_num_threads()
        out = guard.empty("out", rows, size)
        source, target = x.data_ptr(), out.data_ptr()
        for begin, end in tiles(rows, self.most_rows):
            self._functions.gated(
                self._pointer,
                source + 4 * step * begin,
                step,
                end - begin,
                gain,
                eps,
                _ACTIVATIONS[activation],
                target + 4 * size * begin,
                size,
                threads,
            )
        return out


def most_rows(layout: Layout, functions: Functions, splits: bool) -> int:
    """The number of rows up to which a product of the compiled code is as fast as oneDNN's."""
    whole = functions.many_rows if 4 * layout.panel * layout.padded <= PANEL_BYTES else FEW_ROWS
    return max(whole, functions.split_rows) if splits else whole


@functools.cache
def tiles(rows: int, most: int) -> tuple[tuple[int, int], ...]:
    """Rows cut into calls of about equally many."""
    count = -(-rows // most)
    return tuple((rows * tile // count, rows * (tile + 1) // count) for tile in range(count))


def cpp_weight(packed: Tensor, weight: Tensor, bias: Tensor | None, splits: bool) -> CppWeight | None:
    """The handle by which compiled code uses a weight [out, in] that oneDNN packed; None if it cannot.

    Args:
        splits: products of many rows may be added in another order than those of few, if that is faster.
    """
    functions = load()
    if functions is None or not packed.is_mkldnn:
        return None
    shape = (weight.shape[0], weight.shape[1])
    packing = (*shape, torch.get_num_threads())
    if packing in _layouts:
        layout = _layouts[packing]
    else:
        found = _layouts_of(packed, weight)
        layout = found[0] if found else None
        if len(found) < 2:  # a weight of one value fits many layouts, and says nothing about the next weight's
            _layouts[packing] = layout
    return None if layout is None else CppWeight(functions, packed, layout, shape, bias, splits)


_layouts: dict[tuple[int, int, int], Layout | None] = {}
"""By shape and number of threads: oneDNN's choice depends only on the shape, on AVX2 also on the threads."""


def _layouts_of(packed: Tensor, weight: Tensor) -> list[Layout]:
    """All that it lies in, found by comparing all of it, bit for bit."""
    out, depth = weight.shape
    size = torch.ops.mkldnn._nbytes(packed) // 4
    memory = (ctypes.c_int32 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    held, bits = torch.from_numpy(np.frombuffer(memory, dtype=np.int32)), weight.contiguous().view(torch.int32)
    depths = dict.fromkeys(-(-depth // pad) * pad for pad in PADS)
    return [
        Layout(panel, padded)
        for panel in PANELS
        for padded in depths
        if -(-out // panel) * panel * padded == size and _lies_so(held.view(-1, padded, panel), bits)
    ]


def _lies_so(panels: Tensor, bits: Tensor) -> bool:
    depth = bits.shape[1]
    pieces = torch.split(bits, panels.shape[2])
    return all(
        torch.equal(panel[:depth, : piece.shape[0]], piece.T) for panel, piece in zip(panels, pieces, strict=True)
    )


@functools.cache
def load() -> Functions | None:
    """The compiled functions, or None where they are not there or do not equal the reference."""
    library = cpp.load()
    if library is None:
        return None
    rows = np.zeros(2, dtype=np.int64)
    library.function("linear_many_rows", "p")(rows.ctypes.data)
    functions = Functions(
        library.function("linear", "ppiipdidpii"), library.function("linear_gated", "ppiipdipii"), *rows.tolist()
    )
    # Part of a panel, and several; with so many rows that they are dealt out, and that they are split.
    cases = ((96, 7, False), (640, 7, False), (640, 150, False), (640, 40, True))
    right = all(_agrees(functions, *case) for case in cases)
    return cpp.checked(functions, right, "products")


def _agrees(functions: Functions, out: int, rows: int, splits: bool) -> bool:
    """On a weight that is packed by hand."""
    generator = torch.Generator().manual_seed(0)
    depth, count = 33, -(-out // 64)
    x, weight, bias, residual = (
        torch.randn(shape, generator=generator, dtype=torch.float32)
        for shape in ((rows, depth), (out, depth), (out,), (rows, out))
    )
    norm = torch.rand(depth, generator=generator, dtype=torch.float32)
    padded = functional.pad(weight, (0, 3, 0, 64 * count - out))
    panels = padded.view(count, 64, depth + 3).transpose(1, 2).contiguous()
    held = CppWeight.__new__(CppWeight)
    held._functions, held.out_features, held.in_features, held._held = functions, out, depth, (panels, bias)
    held.gates = out % (2 * LANES) == 0
    held.most_rows = max(FEW_ROWS, rows)
    held._numbers = np.array([panels.data_ptr(), 64, depth + 3, depth, out, bias.data_ptr(), splits], dtype=np.int64)
    held._pointer = held._numbers.ctypes.data
    plain = functional.linear(x, weight, bias)
    normed = functional.linear(functional.rms_norm(x, (depth,), norm, 1e-5), weight, bias)
    gate, up = normed.chunk(2, dim=-1)
    found = (
        (held.linear(x, None, 0.0, None, 1.0), plain),
        (held.linear(x, None, 0.0, residual.clone(), 0.5), residual + 0.5 * plain),
        (held.linear(x, norm, 1e-5, None, 1.0), normed),
        (held.gated(x, norm, 1e-5, "silu"), functional.silu(gate) * up),
        (held.gated(x, norm, 1e-5, "gelu_tanh"), functional.gelu(gate, approximate="tanh") * up),
    )
    if not all(torch.allclose(got, expected, atol=1e-4) for got, expected in found):
        return False
    if splits:
        return True
    alone = (held.linear(x[:1], norm, 1e-5, None, 1.0), held.gated(x[:1], norm, 1e-5, "silu"))
    return torch.equal(alone[0], found[2][0][:1]) and torch.equal(alone[1], found[3][0][:1])
