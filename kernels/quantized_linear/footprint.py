"""Decides which quantized weights stay in their codes, on which device, and how much memory they take. Memory planning
and product selection both ask it.

Two properties that an outline does not show may still cause a weight to be dequantized: eight-bit floats that are NaN,
and groups of inputs of unequal size.
"""

from math import ceil

import torch

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.quantized_linear import cpu_blocks, cpu_packed
from troupellm.kernels.quantized_linear.outline import Code, Outline

BYTES: dict[Code, float] = {
    "int8": 1, "int4": 0.5, "table4": 0.5, "float4": 0.5, "fp8": 1, "fp8_e5m2": 1, "mxfp4": 0.5, "mxfp6": 1, "mxfp8": 1,
    "mxfp8_e5m2": 1,
}  # fmt: skip
"""Bytes of a number in its code; six-bit codes are stored in eight bits."""
SCALE = 4
"""Bytes of a scale, or of an offset."""
STACKED_SCALE: dict[Code, int] = {"int8": 2 * SCALE, "int4": 2 * SCALE, "mxfp4": 1}
"""Bytes per scale of stacked experts: integers always have an offset, too, and powers of two stay exponents."""
STACKED_BLOCK = 128
"""Blocks of inputs of stacked eight-bit floats are multiples of it: the largest tile of a product, which has one scale
per output."""
CPU_STEP = 64
"""Largest padding multiple of rows in a CPU's compiled products, and of inputs in those with int8 inputs."""
CPU_ROW = 16
"""Bytes for each row of an int8 weight on a CPU beside its scale: sums of its codes and zeros."""
CPU_TABLE = 16
"""Bytes beside any other weight there."""


def stays(outline: Outline, device: torch.device, dtype: torch.dtype, *, experts: bool = False) -> bool:
    """True if products use the weight in its codes; otherwise it is dequantized when it is loaded.

    Args:
        dtype: of inputs.
        experts: of a mixture, which a GPU has in one tensor.
    """
    if device.type == "cpu":
        return _cpu_keeps(outline, dtype)
    if not by_kernels(device):
        return False
    return stack_keeps(outline) if experts else gpu_keeps(outline)


def held_bytes(outline: Outline, device: torch.device, dtype: torch.dtype, *, experts: bool = False) -> int:
    """Upper bound of a weight's memory once it is loaded, in bytes; arguments as of `stays`."""
    rows, columns = outline.rows, outline.columns
    if not stays(outline, device, dtype, experts=experts):
        return rows * columns * dtype.itemsize
    if device.type == "cpu" and (in_units := outline.row_bytes or _int4_row_bytes(outline)):
        return _rounded_up(rows, cpu_blocks.UNIT) * in_units
    per_row = outline.groups * SCALE * (1 + outline.offsets)
    if device.type == "cpu":
        rows = _rounded_up(rows, CPU_STEP)
        if _int8_inputs(outline):
            columns, per_row = _rounded_up(columns, CPU_STEP), per_row + CPU_ROW
    elif experts:
        per_row = outline.groups * STACKED_SCALE.get(outline.code, SCALE)
    beside = torch.int64.itemsize * columns * outline.ordered + (CPU_TABLE if device.type == "cpu" else 0)
    return ceil(rows * columns * BYTES[outline.code]) + rows * per_row + beside


def in_blocks(outline: Outline, device: torch.device, dtype: torch.dtype) -> bool:
    """True if a CPU's products read the blocks of a GGUF file in their own size, and rows can be read out of them."""
    return device.type == "cpu" and outline.row_bytes > 0 and _cpu_keeps(outline, dtype)


def gpu_keeps(outline: Outline) -> bool:
    """True if a GPU has products for it. With four bits, the table's values must be consecutive."""
    return in_eight_bits(outline) or (outline.decodable and outline.code not in ("mxfp4", "table4"))


def in_eight_bits(outline: Outline) -> bool:
    """True if a GPU computes its products in eight bits: on both sides, with one scale per row of each."""
    return outline.eight_bit_inputs and outline.groups == 1 and outline.code in ("int8", "fp8")


def stack_keeps(outline: Outline) -> bool:
    """True if a GPU's kernels for mixtures of experts take such a weight."""
    match outline.code:
        case "int8" | "int4":
            return outline.decodable and not outline.ordered
        case "fp8" | "fp8_e5m2":
            return outline.groups == 1 or outline.group % STACKED_BLOCK == 0
        case "mxfp4":
            return outline.decodable
        case _:
            return False


def _cpu_keeps(outline: Outline, dtype: torch.dtype) -> bool:
    if _int8_inputs(outline):
        return True
    compiled = cpu_blocks.load() if outline.row_bytes else cpu_packed.load()
    return dtype == torch.float32 and outline.decodable and compiled is not None


def _int4_row_bytes(outline: Outline) -> int:
    """As `Outline.row_bytes`, of codes of four bits with a scale and a minimum in float32; 0 of all else."""
    if outline.code != "int4" or outline.ordered or outline.group % cpu_blocks.GROUP:
        return 0
    block = cpu_blocks.GROUP if outline.group % cpu_blocks.INT4_BLOCK else cpu_blocks.INT4_BLOCK
    return outline.columns // 2 + outline.columns // block * 2 * SCALE


def _int8_inputs(outline: Outline) -> bool:
    return outline.code == "int8" and outline.eight_bit_inputs


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
