"""Draws from whole rows on a GPU, and finds their largest logits: each row is cut into pieces, whose winners a second
launch compares."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.sampling.triton_noise import log_exponential

PIECE = Launch(warps=8, stages=1, constants={"BLOCK": 2048})
MERGE = Launch(warps=1, stages=1)
TILES_OF_A_PIECE = 4
NO_ID = tl.constexpr(2147483647)


@triton.jit
def better(value, index, other, other_index):
    """The larger value; of equal ones the lower index."""
    wins = (other > value) | ((other == value) & (other_index < index))
    return tl.where(wins, other, value), tl.where(wins, other_index, index)


@triton.jit
def winner(scores, ids):
    """The largest score and the lowest index of it; scores hold no NaN."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, ids, NO_ID), 0)


@triton.jit
def piece_kernel(
    values,
    keys,
    codes,
    part_values,
    part_ids,
    width,
    row_stride,
    pieces,
    NOISE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The winner of one piece of one row: the largest value, or the largest one after noise was added."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    if NOISE:
        low, high = tl.load(keys + row * 2), tl.load(keys + row * 2 + 1)
    best, best_id, bad = tl.full([], float("-inf"), tl.float32), tl.full([], NO_ID, tl.int32), 0
    for tile in tl.static_range(TILES):
        ids = (piece * TILES + tile) * BLOCK + lanes
        there = ids < width
        scores = tl.load(values + row * row_stride + ids, there, float("-inf")).to(tl.float32)
        bad += tl.sum((scores != scores).to(tl.int32), 0)
        if NOISE:
            scores -= log_exponential(tl.load(codes + ids, there, 0), low, high)
        here, here_id = winner(tl.where(there & (scores == scores), scores, float("-inf")), ids)
        best, best_id = better(best, best_id, here, here_id)
    tl.store(part_values + row * pieces + piece, tl.where(bad > 0, float("nan"), best))
    tl.store(part_ids + row * pieces + piece, best_id)


@triton.jit
def merged(values, ids, pieces, BLOCK: tl.constexpr):
    """The winner among a row's pieces, and its index; the value is NaN where one of them is."""
    lanes = tl.arange(0, BLOCK)
    found = tl.load(values + lanes, lanes < pieces, float("-inf"))
    bad = tl.sum((found != found).to(tl.int32), 0)
    best, best_id = winner(tl.where(found == found, found, float("-inf")), tl.load(ids + lanes, lanes < pieces, NO_ID))
    return tl.where(bad > 0, float("nan"), best), best_id


@triton.jit
def merge_kernel(part_values, part_ids, out, out_values, pieces, width, BLOCK: tl.constexpr):
    """The winner of one row."""
    row = tl.program_id(0).to(tl.int64)
    best, best_id = merged(part_values + row * pieces, part_ids + row * pieces, pieces, BLOCK)
    tl.store(out + row, tl.minimum(best_id, width - 1).to(tl.int64))
    tl.store(out_values + row, best)


def best_triton(values: Tensor, keys: Tensor | None = None, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `row_best`; with keys and codes as `draw`, where the second result is the best score."""
    rows, width = values.shape
    values = values if values.stride(1) == 1 else values.contiguous()
    pieces = triton.cdiv(width, PIECE.constants["BLOCK"] * TILES_OF_A_PIECE)
    part_values = torch.empty(rows, pieces, dtype=torch.float32, device=values.device)
    part_ids = torch.empty(rows, pieces, dtype=torch.int32, device=values.device)
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    out_values = torch.empty(rows, dtype=torch.float32, device=values.device)
    if rows:
        piece_kernel[(rows, pieces)](
            values,
            keys,
            codes,
            part_values,
            part_ids,
            width,
            values.stride(0),
            pieces,
            NOISE=keys is not None,
            TILES=TILES_OF_A_PIECE,
            **PIECE.options,
        )
        merge_kernel[(rows,)](
            part_values, part_ids, out, out_values, pieces, width, BLOCK=next_power_of_2(pieces), **MERGE.options
        )
    return out, out_values
