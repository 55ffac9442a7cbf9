"""The choice of experts on a GPU: scores, groups, top-k and weights of a token in one program."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.fused_moe.spec import Routing

SOFTMAX, SIGMOID, CHOSEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}


@triton.jit
def first_best(values, columns, WIDTH: tl.constexpr):
    """The largest of `values` and the first of the columns that hold it; WIDTH where all are NaN."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, columns, WIDTH), axis=0)


@triton.jit
def outside_best_groups(
    choice,
    columns,
    experts,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """`choice` with -inf for every expert whose group is not among the best."""
    low = float("-inf")
    own, groups = columns // (experts // GROUPS), tl.arange(0, BLOCK_G)
    worth = tl.full([BLOCK_G], low, tl.float32)
    for group in tl.static_range(GROUPS):
        members = tl.where(own == group, choice, low)
        best, place = first_best(members, columns, BLOCK_E)
        if TOP2:
            best += tl.max(tl.where(columns == place, low, members), axis=0)
        worth = tl.where(groups == group, best, worth)
    chosen = tl.zeros([BLOCK_E], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        _, group = first_best(worth, groups, BLOCK_G)
        chosen = tl.where(own == group, 1, chosen)
        worth = tl.where(groups == group, low, worth)
    return tl.where(chosen == 1, choice, low)


@triton.jit
def route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    row_stride,
    experts,
    scale,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One token. A token whose logits are NaN gets experts that exist, and NaN for weights."""
    token = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    there, low = columns < experts, float("-inf")
    scores = tl.load(logits_ptr + token * row_stride + columns, mask=there, other=low).to(tl.float32)
    if SCORING == SOFTMAX:
        raised = tl.exp(scores - tl.max(scores, axis=0))
        scores = raised / tl.sum(raised, axis=0)
    if SCORING == SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = tl.where(there, scores, low)
    if HAS_BIAS:
        choice += tl.load(bias_ptr + columns, mask=there, other=0.0)
    if GROUPS > 1:
        choice = outside_best_groups(choice, columns, experts, GROUPS, TOP_GROUPS, TOP2, BLOCK_E, BLOCK_G)

    weights = tl.full([BLOCK_K], low if SCORING == CHOSEN else 0.0, tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for place in tl.static_range(TOP_K):
        _, expert = first_best(choice, columns, BLOCK_E)
        expert = tl.minimum(expert, experts - 1)
        weight = tl.sum(tl.where(columns == expert, scores, 0.0), axis=0)
        weights = tl.where(places == place, weight, weights)
        ids = tl.where(places == place, expert, ids)
        choice = tl.where(columns == expert, low, choice)
    if SCORING == CHOSEN:
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(weights_ptr + token * TOP_K + places, weights * scale, mask=places < TOP_K)
    tl.store(ids_ptr + token * TOP_K + places, ids, mask=places < TOP_K)


def route_options(routing: Routing, experts: int, *, has_bias: bool) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
    return {
        "SCORING": _SCORINGS[routing.scoring],
        "RENORMALIZE": routing.renormalize,
        "HAS_BIAS": has_bias,
        "TOP_K": routing.top_k,
        "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups,
        "TOP2": routing.group_score == "top2",
        "BLOCK_E": triton.next_power_of_2(experts),
        "BLOCK_K": triton.next_power_of_2(routing.top_k),
        "BLOCK_G": triton.next_power_of_2(routing.groups),
    }


def route_triton(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `route`; ids are int32."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    route_kernel[(tokens,)](
        logits,
        choice_bias,
        weights,
        ids,
        logits.stride(0),
        experts,
        routing.scale,
        **route_options(routing, experts, has_bias=choice_bias is not None),
        num_warps=1,
    )
    return weights, ids
