"""The kernels of a mixture of experts, compiled for sm_90 at the shapes of Qwen3-30B-A3B and gpt-oss."""

from typing import Any

import pytest

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_offline import SHARED_BYTES, Report, compile_for
from troupellm.kernels.fused_moe.cases import DEEPSEEK, GPT_OSS, QWEN
from troupellm.kernels.fused_moe.stacked import Kind
from troupellm.kernels.fused_moe.tiles import FEW, SUM, product_launch
from troupellm.kernels.fused_moe.triton_align import align_kernel
from troupellm.kernels.fused_moe.triton_experts import (
    few_down_kernel,
    few_gate_up_kernel,
    product_kernel,
    sum_kernel,
)
from troupellm.kernels.fused_moe.triton_route import route_kernel, route_options
from troupellm.kernels.fused_moe.triton_weights import GATE_KINDS, KINDS as CODES

KINDS: dict[Kind, tuple[str, str | None, int]] = {
    "plain": ("*bf16", None, 1),
    "fp8": ("*fp8e4nv", "*fp32", 1),
    "fp8_blocks": ("*fp8e4nv", "*fp32", 128),
    "int8": ("*i8", "*fp32", 2048),
    "mx": ("*u8", "*u8", 32),
    "int4": ("*u8", "*fp32", 128),
}
"""Types of weights and scales, and how many inputs share a scale."""
SIZES = ("in_features", "width", "num_slots", "row_bytes", "row_scales", "input_stride")


def compiled(name: Kind, kernel: Any, launch: Launch, constants: dict[str, Any], group: int | None = None) -> Report:
    """With biases, as the largest variant."""
    values, scales, block = KINDS[name]
    arguments = {
        "inputs": "*bf16",
        "weights": values,
        "bias": "*bf16",
        "routing": "*fp32",
        "out": "*bf16",
        "ids": "*i32",
        "slots_of": "*i32",
        "expert_of": "*i32",
        "count": "*i32",
        "alpha": "fp32",
        "limit": "fp32",
        **dict.fromkeys(SIZES, "i32"),
        "scales": scales or "",
    }
    fixed = {"KIND": CODES[name], "SCALE_K": group or block, **constants}
    fixed |= {"scales": None} if scales is None else {}
    return compile_for(kernel, arguments, launch, fixed)


def gate_of(name: Kind) -> int:
    """The activation of the families that have weights of this kind."""
    return GATE_KINDS["clamped" if name == "mx" else "silu"]


def check(report: Report) -> None:
    assert report.spilled_bytes == 0
    assert report.shared_bytes <= SHARED_BYTES


def check_product(name: Kind, rows: int, group: int | None = None) -> None:
    for gated in (True, False):
        launch = product_launch(rows, name, group or KINDS[name][2], gated=gated)
        constants = {"GATED": gated, "GATE": gate_of(name), "SHARE": 8 if gated else 1, "WHOLE": True}
        if gated:
            constants["routing"] = None
        report = compiled(name, product_kernel, launch, constants, group)
        check(report)
        assert report.count("wgmma.mma_async") > 0 if rows >= 64 else report.count("mma.sync") > 0
        tile = launch.constants["BLOCK_N"] * launch.constants["BLOCK_K"] * (2 if gated else 1)
        tile = tile * {"plain": 2, "mx": 0.5, "int4": 0.5}.get(name, 1)
        assert report.buffers(int(tile)) >= 2, "the loads are not pipelined"


def test_a_product_compiles_without_spills() -> None:
    check_product("plain", 16)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("name", list(KINDS))
def test_all_products_compile_without_spills(name: Kind, rows: int) -> None:
    check_product(name, rows)
    for group in (32, 64) if name in ("int8", "int4") else ():
        check_product(name, rows, group)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "plain" else pytest.mark.slow) for name in KINDS]
)
def test_kernels_for_few_tokens_compile_without_spills(name: Kind) -> None:
    check(compiled(name, few_gate_up_kernel, FEW, {"GATE": gate_of(name), "TOP_K": 8}))
    check(compiled(name, few_down_kernel, FEW, {"TOP_K": 8}))


def test_sum_and_align_compile_without_spills() -> None:
    arguments = {"results": "*bf16", "out": "*bf16", "hidden": "i32"}
    check(compile_for(sum_kernel, arguments, SUM, {"TOP_K": 8}))
    arguments = {
        "ids_ptr": "*i32", "slots_ptr": "*i32", "block_experts_ptr": "*i32", "count_ptr": "*i32", "num_slots": "i32",
        "experts": "i32",
    }  # fmt: skip
    check(compile_for(align_kernel, arguments, Launch(constants={"BLOCK_M": 64, "BLOCK_E": 128, "CHUNK": 1024})))


@pytest.mark.parametrize(
    ("routing", "experts"),
    [(QWEN, 128), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((GPT_OSS, 32), (DEEPSEEK, 256)))],
)
def test_routing_compiles_without_spills(routing: Any, experts: int) -> None:
    arguments = {
        "logits_ptr": "*bf16", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32", "row_stride": "i32",
        "experts": "i32", "scale": "fp32",
    }  # fmt: skip
    check(compile_for(route_kernel, arguments, Launch(warps=1), route_options(routing, experts, has_bias=True)))
