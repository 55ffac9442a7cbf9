"""Tile sizes of products with quantized weights on a GPU, limited to those that compile for sm_90 without spilling."""

from troupellm.kernels.common.triton import Launch, next_power_of_2

EIGHT_BIT = {16: (64, 256, 4, 4), 32: (64, 128, 4, 4), 64: (128, 128, 4, 3), 128: (128, 128, 8, 3)}
CODED = {16: (32, 128, 4, 4), 32: (64, 128, 4, 3), 64: (64, 64, 4, 3), 128: (64, 64, 8, 3)}
FOUR_BITS = CODED | {32: (64, 64, 4, 3), 64: (64, 64, 8, 3)}  # with more in a warp, Triton 3.6 spills
"""BLOCK_N, BLOCK_K, warps and stages by the rows of a tile."""
INVARIANT_ROWS = 64
"""Rows of a tile whose sums may not depend on the number of rows: as in `kernels.linear.fixed_tiles` on a GPU."""
SUM = Launch(warps=4, stages=1, constants={"BLOCK": 512})


def tile_rows(rows: int) -> int:
    """Rows of a tile: just enough for `rows`, within the limits of tensor cores."""
    return min(max(next_power_of_2(rows), 16), 128)


def eight_bit_launch(rows: int) -> Launch:
    """The launch for inputs in eight bits; sums of e4m3 are rounded once per tile, so they depend on it."""
    block_m = tile_rows(rows)
    block_n, block_k, warps, stages = EIGHT_BIT[block_m]
    return Launch(warps, stages, {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k})


def packed_launch(rows: int, kind: str, group: int) -> Launch:
    """The launch for weights in codes with a scale per `group` inputs: a tile within a group has one per output."""
    block_m = tile_rows(rows)
    block_n, block_k, warps, stages = (FOUR_BITS if kind == "table" else CODED)[block_m]
    if group < block_k and group in (32, 64):
        block_k = max(group, 64 if kind == "table" else 32)
    return Launch(warps, stages, {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k})
