"""Launches of the kernels that make up a mixture of experts on a GPU."""

# mypy: disable-error-code="no-untyped-call"

import torch
import triton
from torch import Tensor

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.fused_moe.stacked import StackedExperts, StackedWeight
from troupellm.kernels.fused_moe.tiles import FEW, FEW_TOKENS, SMALLEST, SUM, block_rows, product_launch
from troupellm.kernels.fused_moe.triton_align import Blocks, align, most_blocks
from troupellm.kernels.fused_moe.triton_experts import (
    few_down_kernel,
    few_gate_up_kernel,
    product_kernel,
    sum_kernel,
)
from troupellm.kernels.fused_moe.triton_weights import GATE_KINDS, KINDS


def fused_moe_triton(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    experts: StackedExperts,
    *,
    batch_invariant: bool = False,
    few: bool | None = None,
) -> Tensor:
    """As `fused_moe`; ids int32.

    Args:
        batch_invariant: the same path and tiles for any number of tokens.
        few: force the path without sorting, or the sorted one; None decides by the number of tokens.
    """
    if few is None:
        few = x.shape[0] <= FEW_TOKENS and not batch_invariant
    ids = ids.contiguous()
    if few:
        return _few(x, weights, ids, experts)
    rows = SMALLEST if batch_invariant else block_rows(ids.numel(), experts.down.experts)
    return _sorted(x, weights, ids, experts, rows)


def _sorted(x: Tensor, weights: Tensor, ids: Tensor, experts: StackedExperts, rows: int) -> Tensor:
    (tokens, top_k), hidden, size = ids.shape, x.shape[1], experts.down.in_features
    blocks = align(ids, experts.down.experts, rows)
    between = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    launch = product_launch(rows, experts.gate_up.kind, experts.gate_up.block, gated=True)
    _product(x, experts.gate_up, experts.gate_up_bias, None, between, blocks, launch, top_k, experts)
    results = torch.empty(tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    launch = product_launch(rows, experts.down.kind, experts.down.block, gated=False)
    _product(between, experts.down, experts.down_bias, weights, results, blocks, launch, 1, experts)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    grid = (tokens, triton.cdiv(hidden, SUM.constants["BLOCK_N"]))
    sum_kernel[grid](results, out, hidden, TOP_K=top_k, **SUM.options)
    return out


def _product(
    inputs: Tensor,
    weight: StackedWeight,
    bias: Tensor | None,
    routing: Tensor | None,
    out: Tensor,
    blocks: Blocks,
    launch: Launch,
    share: int,
    experts: StackedExperts,
) -> None:
    num_slots, width = out.shape
    block_m, block_n, block_k = (launch.constants[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    most = most_blocks(num_slots, weight.experts, block_m)
    swiglu = experts.swiglu
    product_kernel[(most * triton.cdiv(width, block_n),)](
        inputs,
        weight.values,
        weight.scales,
        bias,
        routing,
        out,
        *blocks,
        weight.in_features,
        width,
        num_slots,
        weight.values.shape[2],
        _row_scales(weight),
        inputs.stride(0),
        swiglu.alpha,
        swiglu.limit or 0.0,
        GATED=routing is None,
        GATE=GATE_KINDS[swiglu.kind],
        SHARE=share,
        WHOLE=weight.in_features % block_k == 0,
        **kind_options(weight),
        **launch.options,
    )


def _few(x: Tensor, weights: Tensor, ids: Tensor, experts: StackedExperts) -> Tensor:
    (tokens, top_k), hidden, size = ids.shape, x.shape[1], experts.down.in_features
    block_n = FEW.constants["BLOCK_N"]
    gate_up, down, swiglu = experts.gate_up, experts.down, experts.swiglu
    between = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    few_gate_up_kernel[(tokens * top_k, triton.cdiv(size, block_n))](
        x,
        gate_up.values,
        gate_up.scales,
        experts.gate_up_bias,
        ids,
        between,
        hidden,
        size,
        gate_up.values.shape[2],
        _row_scales(gate_up),
        x.stride(0),
        swiglu.alpha,
        swiglu.limit or 0.0,
        GATE=GATE_KINDS[swiglu.kind],
        TOP_K=top_k,
        **kind_options(gate_up),
        **FEW.options,
    )
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    few_down_kernel[(tokens, triton.cdiv(hidden, block_n))](
        between,
        down.values,
        down.scales,
        experts.down_bias,
        ids,
        weights,
        out,
        size,
        hidden,
        down.values.shape[2],
        _row_scales(down),
        TOP_K=top_k,
        **kind_options(down),
        **FEW.options,
    )
    return out


def _row_scales(weight: StackedWeight) -> int:
    return 0 if weight.scales is None else weight.scales.shape[2]


def kind_options(weight: StackedWeight) -> dict[str, int]:
    """Compile-time arguments: the kind of the weights, and the number of inputs that share a scale."""
    return {"KIND": KINDS[weight.kind], "SCALE_K": 1 if weight.kind in ("plain", "fp8") else weight.block}
