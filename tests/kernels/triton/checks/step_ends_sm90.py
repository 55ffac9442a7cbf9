"""Both ends of a decode step, compiled for sm_90 at the shapes of Qwen3."""

from typing import Any

import pytest

from troupellm.kernels.common.triton import Launch
from troupellm.kernels.common.triton_offline import compile_for
from troupellm.kernels.decode_io.triton_inputs import BEGIN, begin_kernel
from troupellm.kernels.decode_io.triton_outputs import FINISH, drawn_piece_kernel, finish_kernel
from troupellm.kernels.sampling.triton_draw import PIECE, TILES_OF_A_PIECE

TYPES = {
    **dict.fromkeys(("slots", "ends", "counts", "streams"), "*i64:1"),
    **dict.fromkeys(("texts", "block_tables", "starts", "context_lens", "tables"), "*i32"),
    **dict.fromkeys(("part_ids", "drawn_ids", "codes"), "*i32"),
    **dict.fromkeys(("token_ids", "positions", "kv_rows", "out"), "*i64"),
    **dict.fromkeys(("values", "part_values", "drawn_values", "scales"), "*fp32"),
    **dict.fromkeys(("angle_table", "angles"), "*bf16"), **dict.fromkeys(("vocab", "row_stride"), "i32"),
    **dict.fromkeys(("length", "slots_of", "width", "scratch", "pieces"), "i32:1"),
}  # fmt: skip


def check(kernel: Any, launch: Launch, constants: dict[str, Any]) -> None:
    report = compile_for(kernel, TYPES, launch, constants)
    assert report.spilled_bytes == 0
    assert report.registers * launch.warps * 32 <= 65536


@pytest.mark.parametrize("queries", [1, 4])
def test_the_beginning_of_a_step_compiles(queries: int) -> None:
    sizes = {"PAGE": 16, "KV_HEADS": 8, "HEADS_BLOCK": 8, "ANGLES": 128, "ANGLES_BLOCK": 128}
    check(begin_kernel, BEGIN, {"QUERIES": queries, **sizes, **({"counts": None} if queries == 1 else {})})


def test_the_end_of_a_step_compiles() -> None:
    pieces = {"PIECES": 32}
    check(finish_kernel, FINISH, {**pieces, **dict.fromkeys(("drawn_values", "drawn_ids", "scales"))})
    check(finish_kernel, FINISH, pieces)
    check(drawn_piece_kernel, PIECE, {**pieces, "TILES": TILES_OF_A_PIECE})
