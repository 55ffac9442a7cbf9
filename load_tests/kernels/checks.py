"""Correctness first: every operation's own cases against its reference, on the device that is measured."""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.fused_moe import cases as fused_moe_cases, fused_moe, pack_experts, route
from troupellm.kernels.fused_moe.reference import fused_moe_reference
from troupellm.kernels.gelu_mul import cases as gelu_mul_cases, gelu_mul
from troupellm.kernels.gelu_mul.reference import gelu_mul_reference
from troupellm.kernels.kv_write import cases as kv_write_cases, kv_rows, kv_write
from troupellm.kernels.linear import cases as linear_cases, linear, pack
from troupellm.kernels.linear.reference import linear_reference
from troupellm.kernels.paged_attention import cases as attention_cases, paged_attention
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.quantized import Int8Channel
from troupellm.kernels.rms_norm import add_rms_norm, cases as rms_norm_cases, rms_norm
from troupellm.kernels.rms_norm.reference import rms_norm_reference
from troupellm.kernels.rope import cases as rope_cases, rope
from troupellm.kernels.rope.reference import rope_reference
from troupellm.kernels.sampling import draw
from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.noise import position_keys, stream_key, token_codes
from troupellm.kernels.silu_mul import cases as silu_mul_cases, silu_mul
from troupellm.kernels.silu_mul.reference import silu_mul_reference

INT8_ERROR = 1e-2
"""Of the largest number: inputs that lie between two steps may be rounded to either."""


class Check(msgspec.Struct, frozen=True):
    operation: str
    case: str
    error: float
    """The largest difference from the reference, over what is allowed; up to 1 is right."""

    @property
    def right(self) -> bool:
        return self.error <= 1.0


class Outcome(msgspec.Struct, frozen=True):
    """What a case gave, and what it should have; without a tolerance they are equal."""

    case: str
    got: Tensor
    expected: Tensor
    tolerance: float = 0.0
    """Of one and of the number that is expected, added up; or of the largest number alone, see `by_largest`."""
    by_largest: bool = False

    def error(self) -> float:
        got, expected = self.got.float().cpu(), self.expected.float().cpu()
        if got.shape != expected.shape or not torch.equal(got.isnan(), expected.isnan()):
            return float("inf")
        got, expected = got.nan_to_num(), expected.nan_to_num()
        if not self.tolerance:
            return 0.0 if torch.equal(got, expected) else float("inf")
        allowed = expected.abs().max() if self.by_largest else 1 + expected.abs()
        return float(((got - expected).abs() / (self.tolerance * allowed)).max())


def check(operation: str, device: torch.device) -> list[Check]:
    """All cases of an operation; those that share another one's kernel have its cases."""
    return [Check(operation, outcome.case, outcome.error()) for outcome in _CHECKS[operation](device.type)]


def _linear(device: str) -> Iterator[Outcome]:
    for case in linear_cases.CASES:
        x, weight, bias = linear_cases.make_inputs(case, device, 1)
        expected = linear_reference(x, weight, bias)
        yield Outcome(case.name, linear(x, pack(weight, bias)), expected, case.tolerance)


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
    for case in silu_mul_cases.CASES:
        gate_up = silu_mul_cases.make_inputs(case, device, 1)
        yield Outcome(case.name, silu_mul(gate_up), silu_mul_reference(gate_up), case.tolerance)


def _gelu_mul(device: str) -> Iterator[Outcome]:
    for case in gelu_mul_cases.CASES:
        gate_up = gelu_mul_cases.make_inputs(case, device, 1)
        yield Outcome(case.name, gelu_mul(gate_up), gelu_mul_reference(gate_up), case.tolerance)


def _kv_write(device: str) -> Iterator[Outcome]:
    for case in kv_write_cases.CASES:
        key, value, keys, values, slots = kv_write_cases.make_inputs(case, device, 1)
        expected = torch.stack((keys, values))
        blocks, places = slots // case.block_size, slots % case.block_size
        expected[0, blocks, :, places], expected[1, blocks, :, places] = key, value
        kv_write(key, value, keys, values, kv_rows(slots, case.kv_heads, case.block_size))
        yield Outcome(case.name, torch.stack((keys, values)), expected)


def _attention(device: str) -> Iterator[Outcome]:
    for case in attention_cases.CASES:
        query, keys, values, plan = attention_cases.make_inputs(case, "cpu", 1)
        sinks, scale = attention_cases.make_sinks(case, "cpu", 2), case.head_dim**-0.5
        items = attention_cases.all_items(case)
        expected = paged_attention_reference(
            query, keys, values, plan.block_tables, items, scale=scale, softcap=case.softcap, sinks=sinks
        )
        if device == "cpu":
            got = paged_attention(query, keys, values, plan, scale, softcap=case.softcap, sinks=sinks)
        else:
            got = _on_device(case, plan.block_tables, (query, keys, values), sinks, scale)
        yield Outcome(case.name, got, expected, case.tolerance)


def _on_device(
    case: attention_cases.Case, tables: Tensor, inputs: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None,
    scale: float,
) -> Tensor:  # fmt: skip
    from troupellm.kernels.paged_attention import triton_launch
    from troupellm.kernels.paged_attention.device_cases import shape_of
    from troupellm.kernels.paged_attention.device_plan import DevicePlan

    device = torch.device("cuda")
    query, keys, values = (tensor.to(device) for tensor in inputs)
    plan = DevicePlan.from_host(
        tables.numpy(), np.asarray(case.starts), np.asarray(case.counts), device=device,
        shape=shape_of(case, keys.dtype),
    )  # fmt: skip
    out = torch.empty_like(query)
    there = None if sinks is None else sinks.to(device)
    triton_launch.run(query, (keys, values), plan, scale, out, softcap=case.softcap, sinks=there)
    return out


def _sampling(device: str) -> Iterator[Outcome]:
    """Every device draws the same tokens, which are those of the noise as it is defined."""
    from troupellm.kernels.sampling.reference import log_exponential

    for rows in (1, 3):
        logits = make_logits(rows, 64, 3.0, 1)
        keys = position_keys(torch.full((rows,), stream_key(7, 0)), torch.arange(rows))
        noise = [[log_exponential(7, 0, 0, row, token) for token in range(64)] for row in range(rows)]
        expected = (logits.double() - torch.tensor(noise, dtype=torch.float64)).argmax(dim=1)
        got = draw(logits.to(device), keys.to(device), token_codes(64, torch.device(device)))
        yield Outcome(f"{rows}_rows", got, expected)


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


_CHECKS: dict[str, Callable[[str], Iterator[Outcome]]] = {
    "linear": _linear,
    "linear_int8": _linear_int8,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "kv_write": _kv_write,
    "decode_attention": _attention,
    "prefill_attention": _attention,
    "sampling": _sampling,
    "fused_moe": _fused_moe,
}
