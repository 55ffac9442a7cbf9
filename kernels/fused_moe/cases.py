"""Shapes, types and tolerances that the tests and the benchmark of fused_moe share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels.fused_moe.spec import SILU, Routing, Swiglu


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tokens: int
    experts: int
    hidden: int
    size: int
    routing: Routing
    dtype: torch.dtype
    tolerance: float
    swiglu: Swiglu = SILU
    bias: bool = False
    skewed: bool = False
    """Most tokens choose the same experts, and some experts get none."""


GELU = Swiglu(activation="gelu_tanh")
CLAMPED = Swiglu(alpha=1.702, limit=7.0)
MIXTRAL = Routing(top_k=2, renormalize=True)
QWEN = Routing(top_k=4, renormalize=True)
PLAIN = Routing(top_k=3)
GPT_OSS = Routing(top_k=4, scoring="softmax_of_chosen")
DEEPSEEK = Routing(top_k=4, scoring="sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2")
DEEPSEEK_V2 = Routing(top_k=3, scale=1.5, groups=4, top_groups=2)

CASES = (
    Case("one_token", 1, 8, 64, 48, MIXTRAL, torch.float32, 1e-4),
    Case("odd_sizes", 5, 7, 33, 17, PLAIN, torch.float32, 1e-4),
    Case("clamped_with_biases", 9, 8, 64, 32, GPT_OSS, torch.float32, 1e-4, CLAMPED, bias=True),
    Case("gelu", 9, 8, 64, 32, QWEN, torch.float32, 1e-4, GELU),
    Case("batch", 40, 16, 96, 64, QWEN, torch.float32, 1e-4),
    Case("skewed", 23, 16, 64, 32, QWEN, torch.float32, 1e-4, skewed=True),
    Case("in_groups", 6, 16, 64, 32, DEEPSEEK, torch.float32, 1e-4),
    Case("one_expert_each", 4, 4, 32, 16, Routing(top_k=1), torch.float32, 1e-4),
    Case("bfloat16", 9, 8, 64, 48, QWEN, torch.bfloat16, 6e-2),
    Case("float16", 9, 8, 64, 48, QWEN, torch.float16, 8e-3),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """x [tokens, hidden]; logits [tokens, experts]; gate_up [experts, 2 * size, hidden]; down [experts, hidden, size];
    biases [experts, 2 * size] and [experts, hidden]."""

    x: Tensor
    logits: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, case.dtype)

    logits = torch.randn(case.tokens, case.experts, generator=generator)
    if case.skewed:
        logits[:, : case.routing.top_k] += 4.0
    size, hidden = case.size, case.hidden
    return Inputs(
        x=normal(case.tokens, hidden),
        logits=logits.to(device, case.dtype),
        gate_up=normal(case.experts, 2 * size, hidden, scale=2 * hidden**-0.5),
        down=normal(case.experts, hidden, size, scale=size**-0.5),
        gate_up_bias=normal(case.experts, 2 * size, scale=4.0) if case.bias else None,
        down_bias=normal(case.experts, hidden) if case.bias else None,
    )
