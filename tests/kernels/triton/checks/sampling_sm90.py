"""The kernels of sampling, compiled for sm_90 at the vocabulary of Qwen3."""

from typing import Any

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_offline import compile_for
from troupellm.kernels.sampling.triton_adjust import (
    ADJUST,
    LOGPROBS,
    TALLY,
    keep_bits_kernel,
    logprobs_kernel,
    penalize_kernel,
    tally_kernel,
)
from troupellm.kernels.sampling.triton_draw import (
    MERGE,
    PIECE,
    TILES_OF_A_PIECE,
    merge_kernel,
    piece_kernel,
)

TYPES = {
    **dict.fromkeys(("logits", "values", "part_values", "out_values"), "*fp32"),
    **dict.fromkeys(("repetition", "frequency", "presence"), "*fp32"),
    **dict.fromkeys(("keys", "codes", "part_ids", "bits", "counts", "seen", "ranks"), "*i32"),
    **dict.fromkeys(("out", "rows", "chosen", "slots", "skips", "prompts", "ends"), "*i64"),
    **dict.fromkeys(("width", "row_stride", "pieces", "words", "vocab"), "i32"), "texts": "*i32", "length": "i32:1",
}  # fmt: skip


def check(kernel: Any, launch: Launch, constants: dict[str, Any] | None = None, **types: str) -> None:
    report = compile_for(kernel, {**TYPES, **types}, launch, constants)
    assert report.spilled_bytes == 0
    assert report.registers * launch.warps * 32 <= 65536


def test_whole_rows() -> None:
    check(piece_kernel, PIECE, {"NOISE": True, "TILES": TILES_OF_A_PIECE})
    check(piece_kernel, PIECE, {"NOISE": False, "TILES": TILES_OF_A_PIECE, "keys": None, "codes": None})
    check(merge_kernel, MERGE, {"BLOCK": 32})


def test_adjustments() -> None:
    check(keep_bits_kernel, ADJUST)
    check(penalize_kernel, ADJUST)
    check(tally_kernel, TALLY)
    check(logprobs_kernel, LOGPROBS, out="*fp32")
