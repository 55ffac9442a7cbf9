"""Products with quantized weights on a GPU.

Inputs in eight bits too: whole numbers or e4m3 on the tensor cores, the scales of rows and outputs behind the sum.
Weights in codes alone: each tile is decoded in registers to the type of the inputs, as `dequantize` has it. Four-bit
tiles are tiles of bytes, whose low halves meet the even inputs and whose high ones the odd.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import multiprocessors
from troupellm.kernels.common.triton_language import INTERPRET, cast, dot
from troupellm.kernels.quantized_linear.packed_weights import PackedWeight
from troupellm.kernels.quantized_linear.tiles import INVARIANT_ROWS, SUM, eight_bit_launch, packed_launch

INT8, FOUR_BITS, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"int8": INT8.value, "table": FOUR_BITS.value, "fp8": FP8.value}


@triton.jit(do_not_specialize=["rows"])
def eight_bit_kernel(
    inputs,
    input_scale,
    weights,
    weight_scale,
    bias,
    out,
    rows,
    width,
    in_features,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of inputs [rows, in_features] times weights [width, in_features], both int8 or both float8_e4m3fn.

    Args:
        input_scale: float32 [rows]; weight_scale: float32 [width].
    """
    tiles = tl.cdiv(width, BLOCK_N)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, valid = column < width, row < rows
    from_row = inputs + row.to(tl.int64)[:, None] * in_features
    from_column = weights + column.to(tl.int64)[None, :] * in_features
    whole: tl.constexpr = inputs.dtype.element_ty == tl.int8
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if whole else tl.float32)
    for k in range(0, in_features, BLOCK_K):
        place = k + tl.arange(0, BLOCK_K)
        there = place < in_features
        x = tl.load(from_row + place[None, :], valid[:, None] & there[None, :], 0 if whole else 0.0)
        w = tl.load(from_column + place[:, None], inside[None, :] & there[:, None], 0 if whole else 0.0)
        if whole:
            acc = tl.dot(x, w, acc, out_dtype=tl.int32)
        elif INTERPRET:
            acc = dot(x, w, acc)
        else:
            acc += tl.dot(x, w)
    result = acc.to(tl.float32) * tl.load(weight_scale + column, inside, 0.0)[None, :]
    result *= tl.load(input_scale + row, valid, 0.0)[:, None]
    if bias is not None:
        result += tl.load(bias + column, inside, 0.0).to(tl.float32)[None, :]
    there = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(there, cast(result, out.dtype.element_ty), valid[:, None] & inside[None, :])


@triton.jit
def decoded(codes, scale, offset, base, KIND: tl.constexpr, dtype: tl.constexpr):
    """Codes of one kind as weights of `dtype`; codes of four bits are 0 to 15 here."""
    if KIND == FP8:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == INT8:
        value = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        value = (codes.to(tl.int32) + base).to(tl.float32)
    return cast(value * scale + offset, dtype)


@triton.jit(do_not_specialize=["rows"])
def packed_kernel(
    inputs,
    codes,
    scales,
    offsets,
    bias,
    out,
    parts,
    rows,
    width,
    in_features,
    groups,
    input_stride,
    depth,
    base,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of outputs over `depth` of the inputs.

    Args:
        inputs: [rows, in_features].
        codes: uint8 [width, in_features], or half as wide of four bits.
        scales, offsets: float32 [width, groups]; GROUP inputs share one. Offsets may be None.
        parts: None, or float32 [programs along the inputs, rows, width] that sums go to instead of `out`.
    """
    tiles = tl.cdiv(width, BLOCK_N)
    row = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    inside, valid = column < width, row < rows
    piece = tl.program_id(1)
    begin, stop = piece * depth, tl.minimum(piece * depth + depth, in_features)
    from_row = inputs + row.to(tl.int64)[:, None] * input_stride
    PACKED: tl.constexpr = 2 if KIND == FOUR_BITS else 1
    from_column = codes + column.to(tl.int64)[None, :] * (in_features // PACKED)
    at_scale = column.to(tl.int64)[None, :] * groups
    dtype: tl.constexpr = inputs.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(begin, stop, BLOCK_K):
        place = k + PACKED * tl.arange(0, BLOCK_K // PACKED)
        there = place < stop
        kept = inside[None, :] & there[:, None]
        tile = tl.load(from_column + (place // PACKED)[:, None], kept, 0)
        if GROUP % BLOCK_K == 0:  # one of each for the tile
            scale = tl.load(scales + at_scale + k // GROUP, inside[None, :], 0.0)
            offset = 0.0 if offsets is None else tl.load(offsets + at_scale + k // GROUP, inside[None, :], 0.0)
        else:
            scale = tl.load(scales + at_scale + (place // GROUP)[:, None], kept, 0.0)
            offset = 0.0 if offsets is None else tl.load(offsets + at_scale + (place // GROUP)[:, None], kept, 0.0)
        given = valid[:, None] & there[None, :]
        x = tl.load(from_row + place[None, :], given, 0.0)
        if KIND == FOUR_BITS:
            acc = dot(x, decoded(tile & 15, scale, offset, base, KIND, dtype), acc)
            odd = tl.load(from_row + place[None, :] + 1, given, 0.0)
            acc = dot(odd, decoded(tile >> 4, scale, offset, base, KIND, dtype), acc)
        else:
            acc = dot(x, decoded(tile, scale, offset, base, KIND, dtype), acc)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    wanted = valid[:, None] & inside[None, :]
    if parts is not None:
        tl.store(parts + piece.to(tl.int64) * rows * width + place, acc, wanted)
    else:
        if bias is not None:
            acc += tl.load(bias + column, inside, 0.0).to(tl.float32)[None, :]
        tl.store(out + place, cast(acc, out.dtype.element_ty), wanted)


@triton.jit(do_not_specialize=["rows", "pieces"])
def sum_kernel(parts, bias, out, rows, width, pieces, BLOCK: tl.constexpr):
    """Add up the pieces of one row's outputs in their order."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for piece in range(pieces):
        total += tl.load(parts + (piece * rows + row) * width + column, inside, 0.0)
    if bias is not None:
        total += tl.load(bias + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + column, cast(total, out.dtype.element_ty), inside)


def eight_bit_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """(x * x_scale) @ (weight * weight_scale).T + bias.

    Args:
        x: [rows, in_features] and weight [out_features, in_features], contiguous, both int8 or both float8_e4m3fn.
        x_scale, weight_scale: float32 [rows] and [out_features].
        batch_invariant: the same tiles for any number of rows.

    Returns:
        [rows, out_features] of `dtype`.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    launch = eight_bit_launch(INVARIANT_ROWS if batch_invariant else rows)
    tiles = triton.cdiv(rows, launch.constants["BLOCK_M"]) * triton.cdiv(width, launch.constants["BLOCK_N"])
    if tiles:
        eight_bit_kernel[(tiles,)](x, x_scale, weight, weight_scale, bias, out, rows, width, depth, **launch.options)
    return out


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, *, batch_invariant: bool = False) -> Tensor:
    """x @ decoded(weight).T + bias, the type of `x`; inputs are in the weight's order.

    Args:
        x: [rows, in_features].
        weight: of the kind "table", the table's numbers follow each other.
        batch_invariant: the same tiles and pieces for any number of rows.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, depth), width, groups = x.shape, weight.codes.shape[0], weight.scale.shape[1]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    launch = packed_launch(INVARIANT_ROWS if batch_invariant else rows, weight.kind, depth // groups)
    block_m, block_n, block_k = (launch.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(width, block_n)
    # Few tiles leave most of a GPU idle while one of its parts walks through all inputs.
    alone = triton.cdiv(width, block_n) if batch_invariant else tiles
    pieces = min(max(multiprocessors(x.device) // alone, 1), triton.cdiv(depth, 4 * block_k), 16)
    step = triton.cdiv(triton.cdiv(depth, block_k), pieces) * block_k
    pieces = triton.cdiv(depth, step)
    parts = torch.empty(pieces, rows, width, dtype=torch.float32, device=x.device) if pieces > 1 else None
    packed_kernel[(tiles, pieces)](
        x,
        weight.codes,
        weight.scale,
        weight.offset,
        bias,
        out,
        parts,
        rows,
        width,
        depth,
        groups,
        x.stride(0),
        step,
        weight.base,
        KIND=KINDS[weight.kind],
        GROUP=depth // groups,
        **launch.options,
    )
    if parts is not None:
        grid = (rows, triton.cdiv(width, SUM.constants["BLOCK"]))
        sum_kernel[grid](parts, bias, out, rows, width, pieces, **SUM.options)
    return out
