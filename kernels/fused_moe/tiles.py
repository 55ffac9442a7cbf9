"""Tile sizes of the products of experts on a GPU.

The tables start from what public engines found for 128 experts of 768 on an H200, and are held to what compiles for
sm_90 without spilling (tests/kernels/triton/checks/fused_moe_sm90.py).
"""

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.fused_moe.stacked import Kind

FEW_TOKENS = 8
"""Up to this number of tokens there is no sorting: each token's program reads the weights of its own experts."""
SMALLEST, LARGEST = 16, 128


GATE_UP = {
    "plain": {16: (64, 128, 4, 3), 32: (64, 128, 4, 3), 64: (64, 64, 4, 4), 128: (128, 64, 8, 3)},
    "fp8": {16: (64, 128, 4, 3), 32: (64, 128, 4, 3), 64: (64, 128, 8, 3), 128: (64, 64, 8, 4)},
    "fp8_blocks": {16: (64, 128, 4, 3), 32: (64, 128, 4, 3), 64: (64, 64, 8, 4), 128: (32, 64, 8, 4)},
    "int8": {16: (64, 64, 4, 3), 32: (64, 64, 4, 3), 64: (64, 64, 8, 3), 128: (32, 64, 8, 3)},
    "mx": {16: (64, 128, 4, 3), 32: (64, 128, 4, 3), 64: (64, 64, 8, 2), 128: (64, 64, 8, 2)},
    "int4": {16: (64, 128, 4, 3), 32: (64, 128, 8, 3), 64: (64, 64, 8, 2), 128: (64, 64, 8, 2)},
}
"""BLOCK_N, BLOCK_K, warps and stages by the rows of a block. There are two tiles of BLOCK_N outputs: gate and up."""
DOWN = {
    "plain": {16: (64, 128, 4, 4), 32: (128, 128, 4, 3), 64: (128, 64, 4, 4), 128: (128, 64, 8, 4)},
    "fp8": {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (64, 128, 8, 3), 128: (64, 128, 8, 3)},
    "fp8_blocks": {16: (64, 64, 4, 4), 32: (64, 128, 4, 4), 64: (64, 128, 8, 3), 128: (64, 64, 8, 4)},
    "int8": {16: (64, 64, 4, 4), 32: (64, 64, 4, 4), 64: (64, 64, 8, 3), 128: (64, 64, 8, 3)},
    "mx": {16: (64, 128, 4, 4), 32: (64, 128, 4, 3), 64: (64, 64, 8, 2), 128: (64, 64, 8, 2)},
    "int4": {16: (64, 128, 4, 4), 32: (64, 128, 4, 3), 64: (64, 64, 8, 2), 128: (64, 64, 8, 2)},
}
FEW = Launch(warps=4, stages=2, constants={"BLOCK_N": 16, "BLOCK_K": 256})
SUM = Launch(warps=4, stages=1, constants={"BLOCK_N": 512})


def block_rows(num_slots: int, experts: int) -> int:
    """Rows of a block: about twice what an expert gets on average, so that most experts have one block."""
    return min(max(next_power_of_2(2 * num_slots // experts), SMALLEST), LARGEST)


def product_launch(rows: int, kind: Kind, group: int, *, gated: bool) -> Launch:
    """For blocks of so many rows. Quantized weights are widened in registers, which leaves room for smaller tiles.

    Args:
        group: inputs that share a scale; tiles of whole numbers are smaller where those are few.
    """
    block_n, block_k, warps, stages = (GATE_UP if gated else DOWN)[kind][rows]
    if kind in ("int8", "int4") and group % block_k:
        block_k //= 2
    return Launch(warps, stages, {"BLOCK_M": rows, "BLOCK_N": block_n, "BLOCK_K": block_k})
