"""Products with quantized weights, compiled for sm_90 at real shapes, with the tile sizes of the tables."""

from typing import Any

import pytest

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_offline import SHARED_BYTES, Report, compile_for
from troupellm.kernels.quantized_linear.tiles import SUM, eight_bit_launch, packed_launch
from troupellm.kernels.quantized_linear.triton_linear import KINDS, eight_bit_kernel, packed_kernel, sum_kernel

TYPES = {
    **dict.fromkeys(("input_scale", "weight_scale", "scales", "offsets", "parts"), "*fp32"), "codes": "*u8",
    **dict.fromkeys(("bias", "out"), "*bf16"), "base": "i32:1", "rows": "i32:1", "groups": "i32:1", "pieces": "i32:1",
    **dict.fromkeys(("width", "in_features", "input_stride", "depth"), "i32"),
}  # fmt: skip


def check(kernel: Any, launch: Launch, constants: dict[str, Any], **types: str) -> Report:
    report = compile_for(kernel, {**TYPES, **types}, launch, constants)
    assert report.spilled_bytes == 0
    assert report.shared_bytes <= SHARED_BYTES
    return report


def eight_bits(kind: str, rows: int) -> None:
    launch = eight_bit_launch(rows)
    report = check(eight_bit_kernel, launch, {}, inputs=kind, weights=kind)
    assert report.count("wgmma.mma_async") + report.count("mma.sync") > 0
    assert report.buffers(launch.constants["BLOCK_N"] * launch.constants["BLOCK_K"]) >= 2, "loads are not pipelined"


def codes(kind: str, rows: int, group: int, **constants: Any) -> None:
    launch = packed_launch(rows, kind, group)
    report = check(
        packed_kernel, launch, {"KIND": KINDS[kind], "GROUP": group, "parts": None, **constants}, inputs="*bf16"
    )
    assert report.count("wgmma.mma_async") + report.count("mma.sync") > 0


def test_four_bits_of_few_rows() -> None:
    codes("table", 1, 128)


@pytest.mark.parametrize("rows", [16, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (32, 64, 128))])
@pytest.mark.parametrize("kind", ["*i8", "*fp8e4nv"])
def test_eight_bits(kind: str, rows: int) -> None:
    eight_bits(kind, rows)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_codes(rows: int) -> None:
    for group in (16, 32, 64, 128, 256):
        codes("table", rows, group)
    for group in (16, 4096):
        codes("int8", rows, group, offsets=None)
    codes("int8", rows, 32)
    codes("fp8", rows, 128, offsets=None)


def test_pieces() -> None:
    launch = packed_launch(1, "table", 128)
    check(packed_kernel, launch, {"KIND": KINDS["table"], "GROUP": 128, "bias": None}, inputs="*bf16")
    check(sum_kernel, SUM, {})
