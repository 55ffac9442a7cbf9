"""The products of experts on a GPU.

Sorted: blocks of slots that share an expert go through two grouped products, the first with the gate behind it and the
second with the routing weight; then each token's results are added up in the order of its choices. Few tokens: nothing
is sorted, a program reads the weights that the token's ids name, and the second product adds the experts up itself, in
the same order. Nothing is atomic, so results repeat bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton_language import cast
from troupellm.kernels.fused_moe.triton_weights import (
    FOUR_BITS,
    FP8_ROWS,
    add_product,
    add_row_product,
    gated,
    load_inputs,
)


@triton.jit(do_not_specialize=["num_slots"])
def product_kernel(
    inputs,
    weights,
    scales,
    bias,
    routing,
    out,
    slots_of,
    expert_of,
    count,
    in_features,
    width,
    num_slots,
    row_bytes,
    row_scales,
    input_stride,
    alpha,
    limit,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    SHARE: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_K: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One block of slots and BLOCK_N outputs of their expert.

    Args:
        inputs: [rows, in_features]; slot s reads row s // SHARE.
        weights: [experts, (2 *) width, row_bytes] in the format KIND; scales: [experts, (2 *) width, row_scales].
        bias: [experts, (2 *) width] or None.
        routing: GATED None, else float32 [slots], factors on the results.
        out: [slots, width].
        width: outputs; GATED has as many of the gate and of up.
        in_features, row_bytes: inputs, and how far apart rows of weights are.
    """
    tiles = tl.cdiv(width, BLOCK_N)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if block < tl.load(count):
        slots = tl.load(slots_of + block * BLOCK_M + tl.arange(0, BLOCK_M))
        expert = tl.load(expert_of + block).to(tl.int64)
        valid = slots < num_slots
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < width
        row = expert * (2 * width if GATED else width) + tl.where(inside, columns, 0)
        rows = inputs + (slots // SHARE).to(tl.int64) * input_stride
        acc, second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, in_features, BLOCK_K):
            even, odd = load_inputs(rows, valid, k, in_features, KIND, BLOCK_K, WHOLE)
            acc = add_product(
                acc,
                even,
                odd,
                weights,
                scales,
                row * row_bytes,
                row * row_scales,
                k,
                in_features,
                KIND,
                BLOCK_K,
                SCALE_K,
                WHOLE,
            )
            if GATED:
                second = add_product(
                    second,
                    even,
                    odd,
                    weights,
                    scales,
                    (row + width) * row_bytes,
                    (row + width) * row_scales,
                    k,
                    in_features,
                    KIND,
                    BLOCK_K,
                    SCALE_K,
                    WHOLE,
                )
        if KIND == FP8_ROWS:
            acc *= tl.load(scales + row)[None, :]
            if GATED:
                second *= tl.load(scales + row + width)[None, :]
        if bias is not None:
            acc += tl.load(bias + row).to(tl.float32)[None, :]
            if GATED:
                second += tl.load(bias + row + width).to(tl.float32)[None, :]
        if GATED:
            acc = gated(acc, second, alpha, limit, GATE)
        else:
            acc *= tl.load(routing + slots, valid, 0.0)[:, None]
        there = out + slots.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(there, cast(acc, out.dtype.element_ty), valid[:, None] & inside[None, :])


@triton.jit
def sum_kernel(results, out, hidden, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add up one token's results [TOP_K, hidden], in their order, in float32."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < hidden
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        total += tl.load(results + (token * TOP_K + place) * hidden + columns, inside, 0.0).to(tl.float32)
    tl.store(out + token * hidden + columns, cast(total, out.dtype.element_ty), inside)


@triton.jit
def few_gate_up_kernel(
    inputs,
    weights,
    scales,
    bias,
    ids,
    out,
    in_features,
    width,
    row_bytes,
    row_scales,
    input_stride,
    alpha,
    limit,
    GATE: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One slot and BLOCK_N outputs of its expert's gate; arguments as `product_kernel`, ids [slots]."""
    slot = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    row = tl.load(ids + slot).to(tl.int64) * (2 * width) + tl.where(inside, columns, 0)
    first = inputs + (slot // TOP_K).to(tl.int64) * input_stride
    WIDE: tl.constexpr = BLOCK_K // 2 if KIND >= FOUR_BITS else BLOCK_K
    gate, up = tl.zeros([BLOCK_N, WIDE], tl.float32), tl.zeros([BLOCK_N, WIDE], tl.float32)
    for k in range(0, in_features, BLOCK_K):
        gate = add_row_product(
            gate,
            first,
            weights,
            scales,
            row * row_bytes,
            row * row_scales,
            k,
            in_features,
            1.0,
            KIND,
            BLOCK_K,
            SCALE_K,
        )
        up = add_row_product(
            up,
            first,
            weights,
            scales,
            (row + width) * row_bytes,
            (row + width) * row_scales,
            k,
            in_features,
            1.0,
            KIND,
            BLOCK_K,
            SCALE_K,
        )
    gate_sum, up_sum = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        gate_sum += tl.load(bias + row).to(tl.float32)
        up_sum += tl.load(bias + row + width).to(tl.float32)
    result = gated(gate_sum, up_sum, alpha, limit, GATE)
    tl.store(out + slot.to(tl.int64) * width + columns, cast(result, out.dtype.element_ty), inside)


@triton.jit
def few_down_kernel(
    inputs,
    weights,
    scales,
    bias,
    ids,
    routing,
    out,
    in_features,
    width,
    row_bytes,
    row_scales,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One token and BLOCK_N of its outputs: all of its experts, one after the other."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < width
    WIDE: tl.constexpr = BLOCK_K // 2 if KIND >= FOUR_BITS else BLOCK_K
    acc, biases = tl.zeros([BLOCK_N, WIDE], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for place in range(TOP_K):
        slot = token * TOP_K + place
        weight = tl.load(routing + slot)
        row = tl.load(ids + slot).to(tl.int64) * width + tl.where(inside, columns, 0)
        for k in range(0, in_features, BLOCK_K):
            acc = add_row_product(
                acc,
                inputs + slot * in_features,
                weights,
                scales,
                row * row_bytes,
                row * row_scales,
                k,
                in_features,
                weight,
                KIND,
                BLOCK_K,
                SCALE_K,
            )
        if bias is not None:
            biases += weight * tl.load(bias + row).to(tl.float32)
    result = tl.sum(acc, 1) + biases
    tl.store(out + token * width + columns, cast(result, out.dtype.element_ty), inside)
