"""Correctness first: every operation's own cases against its reference, on the device that is measured."""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.act_quant import cases as act_quant_cases, quantize_activation
from troupellm.kernels.act_quant.reference import quantize_activation_reference
from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.decode_io import begin, cases as step_cases, finish
from troupellm.kernels.decode_io.reference import begin_reference, finish_reference
from troupellm.kernels.fused_moe import cases as fused_moe_cases, fused_moe, pack_experts, route
from troupellm.kernels.fused_moe.reference import fused_moe_reference
from troupellm.kernels.gated_act import cases as gate_cases, gelu_mul, silu_mul
from troupellm.kernels.gated_act.reference import gelu_mul_reference, silu_mul_reference
from troupellm.kernels.grouped_linear import cases as grouped_linear_cases, grouped_linear
from troupellm.kernels.grouped_linear.reference import grouped_linear_reference
from troupellm.kernels.kv_quant import decode
from troupellm.kernels.linear import cases as linear_cases, linear, pack
from troupellm.kernels.linear.reference import linear_reference
from troupellm.kernels.paged_attention import cases as attention_cases, paged_attention
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.quantized_linear import Fp8, Int8Channel
from troupellm.kernels.rms_norm import add_rms_norm, cases as rms_norm_cases, rms_norm
from troupellm.kernels.rms_norm.reference import rms_norm_reference
from troupellm.kernels.rope_kv_write import cases as rope_kv_write_cases, kv_write_cases, rope_cases, rope_kv_write
from troupellm.kernels.rope_kv_write.kv_write import kv_rows, kv_write
from troupellm.kernels.rope_kv_write.reference import rope_kv_write_reference
from troupellm.kernels.rope_kv_write.rope import rope
from troupellm.kernels.rope_kv_write.rope_reference import rope_reference
from troupellm.load_tests.kernels import more_checks, sampling_checks
from troupellm.load_tests.kernels.outcome import Outcome

INT8_ERROR, FP8_ERROR = 1e-2, 6e-2
"""Of the largest number: inputs that lie between two steps may be rounded to either. A GPU puts the inputs of e4m3 into
that type as well."""
CODES_ERROR, FP8_CODES_ERROR = 2e-2, 0.15
"""Of the largest number: one step, where sums in another order move a number to the one beside it."""


class Check(msgspec.Struct, frozen=True):
    operation: str
    case: str
    error: float
    """The largest difference from the reference, over what is allowed; up to 1 is right."""

    @property
    def right(self) -> bool:
        return self.error <= 1.0


def check(operation: str, device: torch.device) -> list[Check]:
    """All cases of an operation."""
    return [Check(operation, outcome.case, outcome.error()) for outcome in CHECKS_OF[operation](device.type)]


def _linear(device: str) -> Iterator[Outcome]:
    for case in linear_cases.CASES:
        x, weight, bias = linear_cases.make_inputs(case, device, 1)
        expected = linear_reference(x, weight, bias)
        yield Outcome(case.name, linear(x, pack(weight, bias)), expected, case.tolerance)


def _linear_invariant(device: str) -> Iterator[Outcome]:
    """The rows of a step are equal to the bit in every batch and at every place of it."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = ((96, 64),) if device == "cpu" else ((6144, 4096), (4096, 12288), (1024, 3072))
    for out_features, in_features in shapes:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(out_features, in_features, generator=generator).to(device, dtype)
        x = torch.randn(200, in_features, generator=generator).to(device, dtype)
        with batch_invariant():
            packed = pack(weight)
        whole = linear(x, packed)
        for name, got, expected in (
            ("alone", linear(x[130:131], packed), whole[130:131]),
            ("among fewer", linear(x[100:137], packed), whole[100:137]),
            ("elsewhere", linear(x.flip(0), packed).flip(0), whole),
        ):
            yield Outcome(f"{out_features}x{in_features}, {name}", got, expected)


def _linear_int8(device: str) -> Iterator[Outcome]:
    for case in linear_cases.CASES:
        if case.dtype == torch.float32:
            x, weight, bias = linear_cases.make_inputs(case, device, 1)
            quantized = Int8Channel.quantize(weight)
            expected = quantized.product(x, bias)
            got = linear(x, pack(quantized, bias))
            yield Outcome(case.name, got, expected, INT8_ERROR, by_largest=True)


def _rms_norm(device: str) -> Iterator[Outcome]:
    for case in rms_norm_cases.CASES:
        x, weight = rms_norm_cases.make_inputs(case, device, 1)
        yield Outcome(case.name, rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6), case.tolerance)


def _add_rms_norm(device: str) -> Iterator[Outcome]:
    for case in rms_norm_cases.CASES:
        x, weight = rms_norm_cases.make_inputs(case, device, 1)
        residual, _ = rms_norm_cases.make_inputs(case, device, 2)
        expected = rms_norm_reference(x + residual, weight, 1e-6)
        yield Outcome(case.name, add_rms_norm(x, residual, weight, 1e-6), expected, case.tolerance)


def _rope(device: str) -> Iterator[Outcome]:
    for case in rope_cases.CASES:
        x, cos, sin = rope_cases.make_inputs(case, device, 1)
        expected = rope_reference(x, cos, sin, interleaved=case.interleaved)
        yield Outcome(case.name, rope(x, cos, sin, interleaved=case.interleaved), expected, case.tolerance)


def _silu_mul(device: str) -> Iterator[Outcome]:
    for case in gate_cases.CASES:
        gate_up = gate_cases.make_inputs(case, device, 1)
        yield Outcome(case.name, silu_mul(gate_up), silu_mul_reference(gate_up), case.tolerance)


def _gelu_mul(device: str) -> Iterator[Outcome]:
    for case in gate_cases.CASES:
        gate_up = gate_cases.make_inputs(case, device, 1)
        yield Outcome(case.name, gelu_mul(gate_up), gelu_mul_reference(gate_up), case.tolerance)


def _kv_write(device: str) -> Iterator[Outcome]:
    for case in kv_write_cases.CASES:
        key, value, keys, values, slots = kv_write_cases.make_inputs(case, device, 1)
        expected = torch.stack((keys, values))
        blocks, places = slots // case.block_size, slots % case.block_size
        expected[0, blocks, :, places], expected[1, blocks, :, places] = key, value
        kv_write(key, value, keys, values, kv_rows(slots, case.kv_heads, case.block_size))
        yield Outcome(case.name, torch.stack((keys, values)), expected)


def _attention(device: str, *, decoding: bool) -> Iterator[Outcome]:
    """decoding: cases with rows of one token, alone or beside others; else those without."""
    for case in attention_cases.CASES:
        if (1 in case.counts) != decoding:
            continue
        query, keys, values, plan = attention_cases.make_inputs(case, "cpu", 1)
        sinks, scale = attention_cases.make_sinks(case, "cpu", 2), case.head_dim**-0.5
        items = attention_cases.all_items(case)
        expected = paged_attention_reference(
            query, keys, values, plan.block_tables, items, scale=scale, softcap=case.softcap, sinks=sinks
        )
        if device == "cpu":
            got = paged_attention(query, keys, values, plan, scale, softcap=case.softcap, sinks=sinks)
        else:
            got = _on_device(device, case, plan.block_tables, (query, keys, values), sinks, scale)
        yield Outcome(case.name, got, expected, case.tolerance)


def _on_device(
    name: str,
    case: attention_cases.Case,
    tables: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    from troupellm.kernels.paged_attention import triton_launch
    from troupellm.kernels.paged_attention.device_cases import shape_of
    from troupellm.kernels.paged_attention.device_plan import DevicePlan

    device = torch.device(name)
    query, keys, values = (tensor.to(device) for tensor in inputs)
    plan = DevicePlan.from_host(
        tables.numpy(),
        np.asarray(case.starts),
        np.asarray(case.counts),
        device=device,
        shape=shape_of(case, keys.dtype),
    )
    out = torch.empty_like(query)
    there = None if sinks is None else sinks.to(device)
    triton_launch.run(query, (keys, values), plan, scale, out, softcap=case.softcap, sinks=there)
    return out


def _fused_moe(device: str) -> Iterator[Outcome]:
    for case in fused_moe_cases.CASES:
        inputs = fused_moe_cases.make_inputs(case, device, 1)
        weights, ids = route(inputs.logits, case.routing)
        biases = [None if bias is None else tuple(bias) for bias in (inputs.gate_up_bias, inputs.down_bias)]
        stacks = tuple(inputs.gate_up), tuple(inputs.down)
        expected = fused_moe_reference(inputs.x, weights, ids, *stacks, case.swiglu, *biases)
        experts = pack_experts(*stacks, case.swiglu, inputs.gate_up_bias, inputs.down_bias)
        got = fused_moe(inputs.x, weights, ids, experts)
        yield Outcome(case.name, got, expected, case.tolerance)


def _linear_fp8(device: str) -> Iterator[Outcome]:
    for case in linear_cases.CASES:
        if case.dtype == torch.float32:
            x, weight, bias = linear_cases.make_inputs(case, device, 1)
            quantized = Fp8.quantize(weight)
            got = linear(x, pack(quantized, bias))
            yield Outcome(case.name, got, quantized.product(x, bias), FP8_ERROR, by_largest=True)


def _rope_kv_write(device: str) -> Iterator[Outcome]:
    """The operation that a model's layers call; `rope` and `kv_write` are its parts."""
    allowed = {None: 0.0, torch.int8: CODES_ERROR, torch.float8_e4m3fn: FP8_CODES_ERROR}
    for case in rope_kv_write_cases.CASES:
        qkv, caches, rows, norms, angles = rope_kv_write_cases.make_inputs(case, device, 1)
        wanted = (caches[0].clone(), caches[1].clone())
        expected, got = (
            function(qkv, case.heads, written, rows, norms=norms, angles=angles, interleaved=case.interleaved)
            for function, written in ((rope_kv_write_reference, wanted), (rope_kv_write, caches))
        )
        yield Outcome(case.name, got, expected, case.tolerance)
        for pair in zip(caches, wanted, strict=True):
            held, kept = (decode(cache, torch.float32).view(-1, case.head_dim)[rows] for cache in pair)
            tolerance = allowed[case.cache] or case.tolerance
            yield Outcome(f"{case.name}, cache", held, kept, tolerance, by_largest=case.cache is not None)


def _act_quant(device: str) -> Iterator[Outcome]:
    for case in act_quant_cases.CASES:
        x = act_quant_cases.make_inputs(case, device, 1)
        got, expected = (
            values.float() * scale[:, None]
            for values, scale in (quantize_activation(x, case.codes), quantize_activation_reference(x, case.codes))
        )
        tolerance = CODES_ERROR if case.codes == torch.int8 else FP8_CODES_ERROR
        yield Outcome(case.name, got, expected, tolerance, by_largest=True)


def _grouped_linear(device: str) -> Iterator[Outcome]:
    for case in grouped_linear_cases.CASES:
        x, weights, rows, starts, out, scales = grouped_linear_cases.make_inputs(case, device, 1)
        expected = out.clone()
        grouped_linear_reference(x, weights, rows, starts, expected, scales=scales)
        grouped_linear(x, weights, rows, starts, out, scales=scales)
        yield Outcome(case.name, out, expected, case.tolerance)


def _step_begin(device: str) -> Iterator[Outcome]:
    for case in step_cases.CASES:
        made = step_cases.make_inputs(case, device, 1)
        given = (made.slots, made.ends, made.counts, made.texts, made.block_tables, made.angle_table)
        both = (
            function(
                *given, queries=case.queries, block_size=case.block_size, kv_heads=case.kv_heads, scratch=made.scratch
            )
            for function in (begin, begin_reference)
        )
        got, expected = (
            torch.cat((found.token_ids, found.positions, found.starts, found.context_lens, found.kv_rows.flatten()))
            for found in both
        )
        yield Outcome(case.name, got, expected)


def _step_end(device: str) -> Iterator[Outcome]:
    for case in step_cases.CASES:
        made, host = step_cases.make_inputs(case, device, 2), step_cases.make_inputs(case, "cpu", 2)
        expected = finish_reference(host.logits, host.slots, host.ends, host.texts, host.draws)
        yield Outcome(case.name, finish(made.logits, made.slots, made.ends, made.texts, made.draws), expected)


CHECKS_OF: dict[str, Callable[[str], Iterator[Outcome]]] = {
    "linear": _linear,
    "linear_int8": _linear_int8,
    "linear_invariant": _linear_invariant,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "kv_write": _kv_write,
    "decode_attention": partial(_attention, decoding=True),
    "prefill_attention": partial(_attention, decoding=False),
    "sampling": sampling_checks.draws,
    "fused_moe": _fused_moe,
    "linear_fp8": _linear_fp8,
    "rope_kv_write": _rope_kv_write,
    "row_codes": _act_quant,
    "grouped_linear": _grouped_linear,
    "truncated_sampling": sampling_checks.truncated_draws,
    "penalties": sampling_checks.penalties,
    "chosen_logprobs": sampling_checks.descriptions,
    "step_begin": _step_begin,
    "step_end": _step_end,
    "verify_attention": more_checks.verifying,
    "coded_cache_attention": more_checks.coded_caches,
    "latent_attention": more_checks.latent,
    "linear_coded": more_checks.coded_products,
    "coded_experts": more_checks.coded_experts,
    "guide_masks": more_checks.masks,
}
