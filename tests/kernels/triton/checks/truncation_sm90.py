"""Draws from what top_k and top_p leave, compiled for sm_90 at the vocabulary of Qwen3."""

from typing import Any

import pytest

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_offline import SHARED_BYTES, compile_for
from troupellm.kernels.sampling.triton_truncate import (
    LISTED,
    PEAKS,
    SETTLE,
    WALK,
    gather_kernel,
    peaks_kernel,
    settle_kernel,
    survey_kernel,
)

TYPES = {
    **dict.fromkeys(("logits", "part_values", "drawn_values", "lowest", "heads", "spreads", "limits"), "*fp32"),
    **dict.fromkeys(("part_ids", "drawn_ids", "counts", "listing", "listed", "codes", "texts", "keys"), "*i32"),
    **dict.fromkeys(("masses", "out"), "*i64"), **dict.fromkeys(("top_k", "streams", "ends", "slots"), "*i64:1"),
    **dict.fromkeys(("width", "row_stride"), "i32"), "scales": "*fp32:1", "top_p": "*fp64:1",
    **dict.fromkeys(("pieces", "tiles", "drawn_parts", "length"), "i32:1"),
}  # fmt: skip
SIZES = {"LISTED": LISTED, "PIECES": 128}
STEP = {"keys": None}
KEYS = dict.fromkeys(("scales", "streams", "ends", "slots", "texts"))
LIMITS = {**KEYS, "keys": None, "codes": None, "drawn_values": None, "drawn_ids": None}


def check(kernel: Any, launch: Launch, constants: dict[str, Any], *, together: int = 2) -> None:
    """So many programs share a multiprocessor, which hides what one of them waits for."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    report = compile_for(kernel, TYPES, launch, constants)
    assert report.spilled_bytes == 0
    assert report.registers * launch.warps * 32 * together <= 65536
    assert report.shared_bytes * together <= SHARED_BYTES


def test_walks_of_a_step() -> None:
    check(peaks_kernel, PEAKS, {}, together=8)
    check(survey_kernel, WALK, {**SIZES, **STEP})
    check(gather_kernel, WALK, {**SIZES, **STEP})


def test_end_of_a_step() -> None:
    check(settle_kernel, SETTLE, {**SIZES, **STEP})


@pytest.mark.slow
@pytest.mark.parametrize("given", [KEYS, LIMITS], ids=["draws", "limits"])
def test_truncation_of_scaled_rows_compiles(given: dict[str, Any]) -> None:
    check(survey_kernel, WALK, {**SIZES, **given})
    check(gather_kernel, WALK, {**SIZES, **given})
    check(settle_kernel, SETTLE, {**SIZES, **given})
