"""Grouped products on a GPU: tiles of rows that share a group, found on the device from where the groups begin.

The grid is as large as the number of rows and groups can make it, so that a graph may be replayed with other groups.
Group g has its whole tiles and at most one that is not full; programs behind the last tile have nothing to do.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.common.triton_language import cast, dot

BLOCK_M = 16
"""Adapters have few rows each: a larger tile would be mostly empty."""


@triton.jit
def grouped_kernel(
    x,
    weights,
    rows,
    starts,
    out,
    scales,
    groups,
    width,
    in_features,
    x_stride,
    out_stride,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of one group's rows and BLOCK_N outputs."""
    tile = tl.program_id(0)
    index = tl.arange(0, BLOCK_G)
    begins = tl.load(starts + index, index < groups, 0)
    ends = tl.load(starts + index + 1, index < groups, 0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    before = tl.cumsum(tiles, 0) - tiles
    mine = ((tile >= before) & (tile < before + tiles)).to(tl.int32)
    if tl.sum(mine, 0) > 0:
        group = tl.sum(mine * index, 0)
        place = tl.sum(mine * (begins + (tile - before) * BLOCK_M), 0) + tl.arange(0, BLOCK_M)
        valid = place < tl.sum(mine * ends, 0)
        row = tl.load(rows + place, valid, 0).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < width
        from_row = x + row[:, None] * x_stride
        from_column = weights + (group.to(tl.int64) * width + column)[None, :] * in_features
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, in_features, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            there = at < in_features
            given = tl.load(from_row + at[None, :], valid[:, None] & there[None, :], 0.0)
            weight = tl.load(from_column + at[:, None], inside[None, :] & there[:, None], 0.0)
            acc = dot(given, weight, acc)
        if scales is not None:
            acc *= tl.load(scales + group)
        target = out + row[:, None] * out_stride + column[None, :]
        wanted = valid[:, None] & inside[None, :]
        acc += tl.load(target, wanted, 0.0).to(tl.float32)
        tl.store(target, cast(acc, out.dtype.element_ty), wanted)


def grouped_launch(in_features: int, width: int) -> Launch:
    """Wide and flat tiles for the way to a low rank and narrow, deep ones for the way back are the same table."""
    block_n = min(max(next_power_of_2(width), 16), 64)
    block_k = min(max(next_power_of_2(in_features), 16), 128)
    return Launch(4, 3, {"BLOCK_M": BLOCK_M, "BLOCK_N": block_n, "BLOCK_K": block_k})


def grouped_linear_triton(
    x: Tensor, weights: Tensor, rows: Tensor, starts: Tensor, out: Tensor, *, scales: Tensor | None = None
) -> None:
    """As `grouped_linear`."""
    (groups, width, depth), count = weights.shape, rows.shape[0]
    if not count:
        return
    launch = grouped_launch(depth, width)
    used = min(count, groups)
    most_tiles = used + (count - used) // BLOCK_M
    grouped_kernel[(most_tiles, triton.cdiv(width, launch.constants["BLOCK_N"]))](
        x,
        weights,
        rows,
        starts,
        out,
        scales,
        groups,
        width,
        depth,
        x.stride(0),
        out.stride(0),
        BLOCK_G=next_power_of_2(groups),
        **launch.options,
    )
