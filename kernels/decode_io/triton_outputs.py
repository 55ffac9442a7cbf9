"""The end of a decode step on a GPU. It takes two launches, three if tokens are drawn, or four if top_k or top_p cut
off some of the rows.

The first launch finds the largest logit of each piece of each row; the last one compares the pieces, and writes the
token where the next step reads it. Draws subtract the row's largest logit, so they come after the first launch.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.decode_io.spec import Draws
from troupellm.kernels.sampling.triton_draw import (
    NO_ID,
    PIECE,
    TILES_OF_A_PIECE,
    better,
    merged,
    piece_kernel,
    winner,
)
from troupellm.kernels.sampling.triton_noise import log_exponential, position_key
from troupellm.kernels.sampling.triton_truncate import truncated_triton

FINISH = Launch(warps=1, stages=1)
INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize_on_alignment=["streams", "ends"])
def drawn_piece_kernel(
    values,
    part_values,
    part_ids,
    scales,
    streams,
    ends,
    codes,
    drawn_values,
    drawn_ids,
    width,
    row_stride,
    pieces,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
):
    """The winner of one piece of one row with noise; none for rows that take the likeliest token or no token."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], NO_ID, tl.int32)
    factor = tl.load(scales + row * 2)
    peak, _ = merged(part_values + row * pieces, part_ids + row * pieces, pieces, PIECES)
    if (factor > 0) & (tl.abs(peak) < INFINITY):
        least = tl.load(scales + row * 2 + 1)
        low, high = position_key(tl.load(streams + row), tl.load(ends + row))
        for tile in tl.static_range(TILES):
            ids = (piece * TILES + tile) * BLOCK + lanes
            there = ids < width
            scaled = (tl.load(values + row * row_stride + ids, there, float("-inf")) - peak) * factor
            kept = tl.where(there & (scaled >= least), scaled, float("-inf"))
            here, here_id = winner(kept - log_exponential(tl.load(codes + ids, there, 0), low, high), ids)
            best, best_id = better(best, best_id, here, here_id)
    tl.store(drawn_values + row * pieces + piece, best)
    tl.store(drawn_ids + row * pieces + piece, best_id)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["slots", "ends"])
def finish_kernel(
    part_values,
    part_ids,
    drawn_values,
    drawn_ids,
    scales,
    slots,
    ends,
    texts,
    out,
    width,
    pieces,
    length,
    PIECES: tl.constexpr,
):
    """One row's token. Nothing is drawn where there is no `drawn_values`."""
    row = tl.program_id(0).to(tl.int64)
    peak, token = merged(part_values + row * pieces, part_ids + row * pieces, pieces, PIECES)
    if drawn_values is not None:
        _, drawn = merged(drawn_values + row * pieces, drawn_ids + row * pieces, pieces, PIECES)
        token = tl.where(tl.load(scales + row * 2) > 0, drawn, token)
    token = tl.minimum(token, width - 1)
    sound = tl.abs(peak) < INFINITY
    tl.store(out + row, tl.where(sound, token, -1).to(tl.int64))
    tl.store(texts + tl.load(slots + row) * length + tl.load(ends + row), tl.where(sound, token, 0))


def finish_triton(logits: Tensor, slots: Tensor, ends: Tensor, texts: Tensor, draws: Draws | None) -> Tensor:
    """As `finish`."""
    (rows, width), device = logits.shape, logits.device
    if draws is not None and draws.nucleus is not None:
        top_k, top_p = draws.nucleus.top_k.flatten(), draws.nucleus.top_p.flatten()
        return truncated_triton(
            logits,
            top_k,
            top_p,
            draws.codes,
            scales=draws.scales,
            streams=draws.streams,
            ends=ends,
            slots=slots,
            texts=texts,
        )[0]
    pieces = triton.cdiv(width, PIECE.constants["BLOCK"] * TILES_OF_A_PIECE)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return out
    parts = _parts(rows, pieces, device)
    grid, block = (rows, pieces), next_power_of_2(pieces)
    piece_kernel[grid](
        logits,
        None,
        None,
        *parts,
        width,
        logits.stride(0),
        pieces,
        NOISE=False,
        TILES=TILES_OF_A_PIECE,
        **PIECE.options,
    )
    drawn: tuple[Tensor | None, Tensor | None, Tensor | None] = None, None, None
    if draws is not None:
        values, ids = _parts(rows, pieces, device)
        drawn_piece_kernel[grid](
            logits,
            *parts,
            draws.scales,
            draws.streams,
            ends,
            draws.codes,
            values,
            ids,
            width,
            logits.stride(0),
            pieces,
            TILES=TILES_OF_A_PIECE,
            PIECES=block,
            **PIECE.options,
        )
        drawn = values, ids, draws.scales
    finish_kernel[(rows,)](
        *parts, *drawn, slots, ends, texts, out, width, pieces, texts.shape[1], PIECES=block, **FINISH.options
    )
    return out


def _parts(rows: int, pieces: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tensors for the largest number of each piece and its index."""
    return (
        torch.empty(rows, pieces, dtype=torch.float32, device=device),
        torch.empty(rows, pieces, dtype=torch.int32, device=device),
    )
