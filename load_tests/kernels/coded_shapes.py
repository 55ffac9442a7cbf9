"""Shapes of weights and caches in few bits, and of latent vectors."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.fused_moe import Routing, fused_moe, pack_experts, route
from troupellm.kernels.linear import pack
from troupellm.kernels.mla_attention import mla_attention
from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.quantized_linear import Int4Group, QuantizedWeight
from troupellm.load_tests.kernels.shapes import BLOCK_SIZE, Shapes, Work

GROUP = 128
LATENT, ROTATED, PLAIN, VALUE = 512, 64, 128, 128
"""Of DeepSeek's models; heads are those of the model that is measured."""


def products(shapes: Shapes, batch: int) -> Iterator[Work]:
    """Inputs in the model's type, weights of four bits in groups of 128 inputs (of 32 where these do not divide)."""
    for name, (rows, columns) in shapes.matrices().items():
        weight = _four_bits(shapes.random(rows, columns))
        size = _bytes(weight)
        each = torch.arange(rows, device=shapes.device)  # so that each has memory of its own
        packed = [pack(weight.rows(each)) for _ in range(shapes.copies(size))]
        yield shapes.product(f"{name} {batch}x{columns}x{rows}", packed, batch, size, shapes.kind)


def caches(shapes: Shapes, batch: int) -> Iterator[Work]:
    """Decoding over caches of eight bits."""
    for codes, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "fp8")):
        keys = [shapes.context - 1] * batch
        yield from shapes.attention(f"{name} {batch} rows, {shapes.context} keys", keys, [1] * batch, codes)


def experts(shapes: Shapes, batch: int) -> Iterator[Work]:
    """One layer's experts in four bits, for models that have them; uniform routing."""
    size, inner = shapes.size, shapes.size.expert_intermediate
    if not size.experts:
        return
    gate_up = [_four_bits(shapes.random(2 * inner, size.hidden)) for _ in range(size.experts)]
    down = [_four_bits(shapes.random(size.hidden, inner)) for _ in range(size.experts)]
    one = _bytes(gate_up[0]) + _bytes(down[0])
    packed = pack_experts(gate_up, down)
    x, logits = shapes.random(batch, size.hidden), shapes.random(batch, size.experts)
    weights, ids = route(logits, Routing(top_k=size.active_experts, renormalize=True))
    used = len(set(ids.flatten().tolist()))
    yield Work(
        f"experts {batch} rows, {used} used",
        lambda _: fused_moe(x, weights, ids, packed),
        size=used * one,
        flops=2 * batch * size.active_experts * 3 * inner * size.hidden,
        kind=shapes.kind,
    )


def latent(shapes: Shapes, batch: int) -> Iterator[Work]:
    """Decoding over latent vectors: each is read once, for all heads."""
    heads, context, width = shapes.size.heads, shapes.context, LATENT + ROTATED
    blocks = -(-context // BLOCK_SIZE)
    size = batch * context * width * shapes.width
    cached = [shapes.random(batch * blocks, 1, BLOCK_SIZE, width) for _ in range(max(2, min(4, shapes.copies(size))))]
    key_weight, value_weight = shapes.random(heads, PLAIN, LATENT), shapes.random(heads, VALUE, LATENT)
    query, plan = shapes.random(batch, heads, PLAIN + ROTATED), _latent_plan(shapes, batch, blocks)
    scale = (PLAIN + ROTATED) ** -0.5

    def run(number: int) -> Tensor:
        return mla_attention(query, cached[number % len(cached)], plan, key_weight, value_weight, scale)

    moved = size + (key_weight.numel() + value_weight.numel() + query.numel()) * shapes.width
    absorbed = batch * heads * LATENT * (PLAIN + VALUE)
    flops = 2 * (absorbed + batch * context * heads * (width + LATENT))
    yield Work(f"latent {batch} rows, {context} keys", run, size=moved, flops=flops, kind=shapes.kind)


def _latent_plan(shapes: Shapes, batch: int, blocks: int) -> Plan:
    tables = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    starts, counts = np.full(batch, shapes.context - 1), np.ones(batch, dtype=np.int64)
    if shapes.device.type == "cpu":
        return AttentionPlan(tables, starts, counts, block_size=BLOCK_SIZE, num_kv_heads=1)
    from troupellm.kernels.paged_attention.device_plan import AttentionShape, DevicePlan

    shape = AttentionShape(shapes.size.heads, 1, LATENT + ROTATED, BLOCK_SIZE, kv_dtype=shapes.dtype, latent=LATENT)
    return DevicePlan.from_host(tables, starts, counts, shape=shape, device=shapes.device)


def _four_bits(weight: Tensor) -> Int4Group:
    return Int4Group.quantize(weight, GROUP if weight.shape[1] % GROUP == 0 else 32)


def _bytes(weight: QuantizedWeight) -> int:
    return sum(tensor.nbytes for tensor in weight.tensors())
