"""Cases of weights and caches in few bits, of latent vectors, of drafts that are verified, and of guides' masks."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.fused_moe import cases as fused_moe_cases, fused_moe, pack_experts, route
from troupellm.kernels.fused_moe.reference import fused_moe_reference
from troupellm.kernels.kv_quant import decode
from troupellm.kernels.linear import linear, pack
from troupellm.kernels.mla_attention import cases as mla_cases, mla_attention
from troupellm.kernels.mla_attention.reference import mla_attention_reference
from troupellm.kernels.paged_attention import Plan, cases as attention_cases, cpu, device_cases, paged_attention
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.quantized_linear import Fp8, Int4Group, Int8WeightOnly, QuantizedWeight
from troupellm.kernels.quantized_linear.gguf import GgufBlocks
from troupellm.kernels.sampling.adjust import keep_bits, unpacked
from troupellm.kernels.sampling.cases import make_logits
from troupellm.load_tests.kernels.outcome import Outcome

CODED_ERROR = 1e-2
"""Of the largest number: weights are the very numbers of the reference, and inputs may be rounded to eight bits."""
CACHE_ERROR = 1e-3
"""On a GPU; a CPU may round queries and weights, too."""
CODED_CASES = ("decodes", "wide_group", "odd_blocks", "chunk_with_past", "window")
CODES = (torch.float8_e4m3fn, torch.int8)


def verifying(device: str) -> Iterator[Outcome]:
    """Attention of rows with as many tokens as each other, more than one: drafts."""
    for case in device_cases.DEVICE_CASES:
        if min(case.counts) > 1 and len(set(case.counts)) == 1:
            yield _attention(case, device, None)


def coded_caches(device: str) -> Iterator[Outcome]:
    """Attention that reads caches of eight bits."""
    for case in attention_cases.CASES:
        if case.name in CODED_CASES:
            yield from (_attention(case, device, codes) for codes in CODES)


def _attention(case: attention_cases.Case, device: str, codes: torch.dtype | None) -> Outcome:
    query, keys, values, plan = attention_cases.make_inputs(case, "cpu", 1)
    scale = case.head_dim**-0.5
    if codes is not None:
        keys, values = (device_cases.poisoned_cache(cache, codes) for cache in (keys, values))
    plain = [cache if codes is None else decode(cache, torch.float32) for cache in (keys, values)]
    expected = paged_attention_reference(
        query,
        plain[0],
        plain[1],
        plan.block_tables,
        attention_cases.all_items(case),
        scale=scale,
        softcap=case.softcap,
    )
    if device == "cpu":
        got = paged_attention(query, keys, values, plan, scale, softcap=case.softcap)
    else:
        from troupellm.kernels.paged_attention import triton_launch

        there = device_cases.make_device_inputs(case, torch.device(device), 1, small=False, quantized=codes)
        got = torch.empty_like(there.query)
        triton_launch.run(there.query, (there.keys, there.values), there.plan, scale, got, softcap=case.softcap)
    name = case.name if codes is None else f"{case.name}, {str(codes).removeprefix('torch.')}"
    if codes is not None and device == "cpu":
        return Outcome(name, got, expected, cpu.ROUNDED, by_largest=True)
    return Outcome(name, got, expected, case.tolerance if codes is None else CACHE_ERROR)


def latent(device: str) -> Iterator[Outcome]:
    """Attention to latent vectors."""
    for case in mla_cases.CASES:
        made = mla_cases.make_inputs(case, "cpu", 1)
        expected = mla_attention_reference(
            made.query, made.cache, made.plan.block_tables, made.items, made.key_weight, made.value_weight, made.scale
        )
        parts, plan = (made.query, made.cache, made.key_weight, made.value_weight), made.plan
        query, cache, key_weight, value_weight = (part.to(device) for part in parts)
        got = mla_attention(
            query,
            cache,
            plan if device == "cpu" else _latent_plan(case, made, device),
            key_weight,
            value_weight,
            made.scale,
        )
        yield Outcome(case.name, got, expected, mla_cases.TOLERANCES[case.dtype])


def _latent_plan(case: mla_cases.Case, made: mla_cases.Inputs, device: str) -> Plan:
    from troupellm.kernels.paged_attention.device_plan import AttentionShape, DevicePlan

    shape = AttentionShape(
        case.heads, 1, case.latent + case.rotated, case.block_size, kv_dtype=made.cache.dtype, latent=case.latent
    )
    return DevicePlan.from_host(
        made.plan.block_tables.numpy(),
        np.array(case.contexts),
        np.array(case.counts),
        shape=shape,
        device=torch.device(device),
    )


def coded_products(device: str) -> Iterator[Outcome]:
    """Inputs in their own type, weights in eight or four bits."""
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(192, 256, generator=generator).to(device)
    weights: dict[str, QuantizedWeight] = {
        "int4, groups of 32": Int4Group.quantize(plain, 32),
        "int4, groups of 128": Int4Group.quantize(plain, 128),
        "int8": Int8WeightOnly.quantize(plain),
        "gguf q8_0": GgufBlocks(_blocks(34, generator).to(device), "Q8_0"),
        "gguf q4_0": GgufBlocks(_blocks(18, generator).to(device), "Q4_0"),
    }
    for rows in (1, 5, 70):
        x = torch.randn(rows, 256, generator=generator).to(device)
        for name, weight in weights.items():
            expected = x @ weight.dequantize(torch.float32).t()
            yield Outcome(f"{name}, {rows} rows", linear(x, pack(weight)), expected, CODED_ERROR, by_largest=True)


def _blocks(size: int, generator: torch.Generator) -> Tensor:
    """Of 192 outputs with 256 inputs each: a scale in half precision, and codes behind it."""
    blocks = torch.randint(0, 256, (192, 8, size), generator=generator, dtype=torch.uint8)
    scales = torch.rand(192, 8, 1, generator=generator).add(0.5).half()
    blocks[:, :, :2] = scales.view(torch.uint8)
    return blocks.flatten(1)


def coded_experts(device: str) -> Iterator[Outcome]:
    """Of which only those that are computed in float32, so that weights alone are rounded."""
    for case in fused_moe_cases.CASES:
        if case.dtype != torch.float32 or case.name == "odd_sizes":  # pairs of four bits
            continue
        made = fused_moe_cases.make_inputs(case, device, 1)
        weights, ids = route(made.logits, case.routing)
        biases = [None if bias is None else tuple(bias) for bias in (made.gate_up_bias, made.down_bias)]
        for name, kind in KINDS.items():
            stacks = [[kind(weight) for weight in stack] for stack in (made.gate_up, made.down)]
            plain = [tuple(weight.dequantize(torch.float32) for weight in stack) for stack in stacks]
            expected = fused_moe_reference(made.x, weights, ids, plain[0], plain[1], case.swiglu, *biases)
            experts = pack_experts(stacks[0], stacks[1], case.swiglu, made.gate_up_bias, made.down_bias)
            got = fused_moe(made.x, weights, ids, experts)
            yield Outcome(f"{case.name}, {name}", got, expected, 6 * CODED_ERROR, by_largest=True)


def _int4(weight: Tensor) -> Int4Group:
    return Int4Group.quantize(weight, 32 if weight.shape[1] % 32 == 0 else weight.shape[1])


KINDS: dict[str, Callable[[Tensor], QuantizedWeight]] = {"int4": _int4, "fp8": Fp8.quantize}


def masks(device: str) -> Iterator[Outcome]:
    """Of guided rows among others."""
    generator = torch.Generator().manual_seed(1)
    for vocab in (40, 999, 4096):
        logits, rows = make_logits(5, vocab, 3.0, 1), torch.tensor([3, 0, 4])
        bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).int()
        expected = logits.clone()
        expected[rows] = expected[rows].masked_fill(~unpacked(bits, vocab), -torch.inf)
        got = logits.to(device)
        keep_bits(got, rows.to(device), bits.to(device))
        yield Outcome(f"{vocab} tokens", got, expected)
