"""Norms, gates, rows in eight bits and what lies before attention, compiled for sm_90 at the shapes of Qwen3-8B."""

from typing import Any

import pytest

from troupellm.kernels.act_quant.triton_act_quant import LAUNCH, quantize_activation_kernel
from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_increment import increment_kernel
from troupellm.kernels.common.triton_offline import compile_for
from troupellm.kernels.gated_act.triton_gate import GATE, GATE_QUANTIZED, gate_kernel, gate_quantized_kernel
from troupellm.kernels.rms_norm.triton_norm import norm_launch, rms_norm_kernel
from troupellm.kernels.rope_kv_write.triton_rope import head_launch, rope_kv_write_kernel

CODES = ("*i8", "*fp8e4nv")


def check(kernel: Any, arguments: dict[str, str], launch: Launch, constants: dict[str, Any]) -> None:
    report = compile_for(kernel, {"size": "i32", **arguments}, launch, constants)
    assert report.spilled_bytes == 0
    assert report.registers * launch.warps * 32 <= 65536


def norm(size: int, out: str = "*bf16", *, residual: bool = True, offset: bool = False) -> None:
    arguments = {
        **dict.fromkeys(("x", "residual", "weight"), "*bf16"),
        "out": out,
        "scales": "*fp32",
        "rows": "i32:1",
        **dict.fromkeys(("inner", "outer_stride", "inner_stride", "residual_stride"), "i32"),
        "eps": "fp32",
        "offset": "fp32",
    }
    missing = ([] if residual else ["residual"]) + (["scales"] if out == "*bf16" else [])
    check(rms_norm_kernel, arguments, norm_launch(size), {"OFFSET": offset, **dict.fromkeys(missing)})


def heads(
    cache: str = "*bf16",
    *,
    half: int = 64,
    interleaved: bool = False,
    normed: bool = True,
    queries: int = 32,
    kv: int = 8,
) -> None:
    strides = ("query_stride", "query_head", "key_stride", "key_head", "value_stride", "value_head", "angle_stride")
    arguments = {
        **dict.fromkeys(("query", "key", "value", "query_norm", "key_norm", "cos", "sin", "out"), "*bf16"),
        "rows_of": "*i64",
        **dict.fromkeys(("key_cache", "value_cache"), cache),
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32"),
        **dict.fromkeys(strides, "i32"),
        "tokens": "i32:1",
        "eps": "fp32",
    }
    constants: dict[str, Any] = {
        "HEADS": queries,
        "KV_HEADS": kv,
        "HEAD_DIM": 128,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "ROW": 132 if cache == "*i8" else 128,
    }
    missing = ([] if normed else ["query_norm", "key_norm"]) + (
        [] if cache == "*i8" else ["key_scales", "value_scales"]
    )
    check(rope_kv_write_kernel, arguments, head_launch(128, half), {**constants, **dict.fromkeys(missing)})


def test_a_norm_compiles_without_spills() -> None:
    norm(4096)


def test_rotation_and_writing_compile_without_spills() -> None:
    heads("*i8")


@pytest.mark.slow
@pytest.mark.parametrize("size", [128, 1024, 8192, 16384, 32768])
def test_norms_of_each_size_compile_without_spills(size: int) -> None:
    norm(size)
    norm(size, residual=False, offset=True)
    norm(size, "*fp8e4nv")


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["*bf16", *CODES])
def test_rotation_and_writing_of_each_cache_compile(cache: str) -> None:
    heads(cache)
    heads(cache, half=32)
    heads(cache, half=0, normed=False)
    heads(cache, interleaved=True)


def test_rotation_alone_and_writing_alone() -> None:
    heads(normed=False, kv=0)
    heads(half=0, normed=False, queries=0)


def test_gates_and_codes_compile_without_spills() -> None:
    for gelu in (False, True):
        check(gate_kernel, {"gate_up": "*bf16", "out": "*bf16", "row_stride": "i32"}, GATE, {"GELU": gelu})
        for out in CODES:
            arguments = {"gate_up": "*bf16", "out": out, "scales": "*fp32", "row_stride": "i32"}
            check(gate_quantized_kernel, arguments, GATE_QUANTIZED, {"GELU": gelu})
    for out in CODES:
        check(
            quantize_activation_kernel, {"x": "*bf16", "out": out, "scales": "*fp32", "row_stride": "i32"}, LAUNCH, {}
        )


def test_the_probe_compiles() -> None:
    assert compile_for(increment_kernel, {"values": "*i32"}, Launch(), {"ELEMENTS": 16}).spilled_bytes == 0
