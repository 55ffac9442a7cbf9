"""Low-rank products by compiled code: float32 on a CPU, each row by itself."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels import cpp
from troupellm.kernels.cpp.checks import FLOAT, check, check_array, check_rows, require, rows_of
from troupellm.kernels.low_rank.reference import low_rank_reference
from troupellm.kernels.low_rank.weights import HostRows, LowRankWeights, grouped_rows

MOST_PARTS = 3
"""As in low_rank.h."""


def takes_native(x: Tensor, weights: LowRankWeights, out: Tensor) -> bool:
    """True if the compiled code computes this product."""
    plain = x.is_cpu and x.dtype is out.dtype is weights.down.dtype is FLOAT and len(weights.ups) <= MOST_PARTS
    return plain and load() is not None


def low_rank_native(x: Tensor, weights: LowRankWeights, rows: HostRows, out: Tensor) -> None:
    """As `low_rank_add`.

    Raises:
        RefusedCall: a tensor of another type or shape, or a row or group that is not there.
    """
    function = load()
    assert function is not None
    _add(function, x, weights, rows, out)


def _add(function: cpp.Function, x: Tensor, weights: LowRankWeights, rows: HostRows, out: Tensor) -> None:
    numbers = np.array(numbers_of(weights), dtype=np.int64)
    count, x_apart = rows_of("x", x, weights.down.shape[2])
    out_apart = check_rows("out", out, count, weights.out_features)
    listed = _Rows.of(rows)
    function(
        numbers.ctypes.data,
        x.data_ptr(),
        x_apart,
        count,
        *listed.numbers,
        1.0,
        out.data_ptr(),
        out_apart,
        torch.get_num_threads(),
    )


def numbers_of(weights: LowRankWeights) -> list[int]:
    """`struct LowRank` of low_rank.h; good while the weights' tensors are there.

    Raises:
        RefusedCall: a tensor of another type or shape.
    """
    groups, rows, depth = weights.down.shape
    parts = len(weights.ups)
    require(0 < parts <= MOST_PARTS and rows == parts * weights.rank, f"{rows} rows of {parts} parts")
    check("down", weights.down, FLOAT, groups, rows, depth)
    check_array("ranks", weights.ranks, np.int64, groups)
    require(weights.ranks.min() >= 0 and weights.ranks.max() <= weights.rank, f"ranks beyond {weights.rank}")
    listed: list[int] = []
    for up, begin, width in zip(weights.ups, weights.begins, weights.widths, strict=True):
        check("up", up, FLOAT, groups, weights.rank, width)
        require(begin >= 0 and begin + width <= weights.out_features, "a part beyond the outputs")
        listed += [up.data_ptr(), begin, width]
    bias = 0
    if weights.bias is not None:
        check("bias", weights.bias, FLOAT, groups, weights.out_features)
        bias = weights.bias.data_ptr()
    return [
        weights.down.data_ptr(),
        weights.ranks.ctypes.data,
        bias,
        groups,
        weights.rank,
        depth,
        weights.out_features,
        parts,
        *listed,
        *(0,) * (3 * (MOST_PARTS - parts)),
    ]


@dataclass(frozen=True, slots=True)
class _Rows:
    """`struct LowRankRows` of low_rank.h, and the memory that it names."""

    held: tuple[NDArray[np.int64], NDArray[np.int64]]

    @classmethod
    def of(cls, rows: HostRows) -> "_Rows":
        count = rows.rows.size
        held = np.ascontiguousarray(rows.rows), np.ascontiguousarray(rows.groups)
        for name, array in zip(("rows", "groups"), held, strict=True):
            check_array(name, array, np.int64, count)
        return cls(held)

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.held[0].ctypes.data, self.held[1].ctypes.data, self.held[0].size


class LayerWeights:
    """The weights of qkv, out, gate_up and down of each layer, as compiled code reads them. Good while none of their
    tensors is replaced; ranks and numbers may change in place."""

    __slots__ = ("held", "pointer")

    def __init__(self, weights: Sequence[LowRankWeights]) -> None:
        """
        Raises:
            RefusedCall: a tensor of another type or shape, or layers of different groups.
        """
        require(len({part.down.shape[0] for part in weights}) == 1, "layers of different groups")
        table = np.array([numbers_of(part) for part in weights], dtype=np.int64)
        self.held, self.pointer = (table, tuple(weights)), table.ctypes.data


class LayerAdapters:
    """The additions of adapters to the products of all layers in one step: `struct Adapters` of decoder_layers.h."""

    __slots__ = ("_held", "pointer")

    def __init__(self, weights: LayerWeights, rows: HostRows, kept: HostRows) -> None:
        """
        Args:
            rows: of all rows.
            kept: of those that are kept behind the last layer's attention.
        """
        lists = _Rows.of(rows), _Rows.of(kept)
        numbers = np.array([weights.pointer, *lists[0].numbers, *lists[1].numbers], dtype=np.int64)
        self._held, self.pointer = (weights, lists, numbers), numbers.ctypes.data


@functools.cache
def load() -> cpp.Function | None:
    """The compiled function; None without one."""
    library = cpp.load()
    if library is None:
        return None
    function = library.function("low_rank_add", "ppii" + "ppi" + "d" + "pi" + "i")
    return cpp.checked(function, _agrees(function), "low-rank products")


def _agrees(function: cpp.Function) -> bool:
    """Compare with the reference on a small case."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=FLOAT)

    weights = LowRankWeights(2, 6, 19, (5, 33), FLOAT, torch.device("cpu"))
    for group, rank in enumerate((6, 2)):
        for part, width in enumerate(weights.widths):
            weights.put(group, part, drawn(rank, 19), drawn(width, rank), drawn(width) if part else None)
    rows = grouped_rows(np.array([1, -1, 0, 1, 0]), 2, torch.from_numpy)
    x, out = drawn(5, 19), drawn(5, 38)
    expected = out.clone()
    assert rows.host is not None
    low_rank_reference(x, weights, rows.host, expected)
    _add(function, x, weights, rows.host, out)
    return torch.allclose(out, expected, atol=1e-4)
