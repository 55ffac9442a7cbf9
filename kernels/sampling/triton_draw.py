"""Drawing on a GPU without a sort and without waiting for the device.

Whole rows: each is cut into pieces, whose winners a second launch compares. Truncated rows: the k-th largest logit and
the smallest one of the nucleus are found by pivots. A logit's bits, put in order, are a number whose digits are found
from the highest on, three bits at a walk through the row: the largest number that still has enough tokens, or enough
of the probability, at it and above it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.sampling.triton_noise import log_exponential
from troupellm.kernels.triton_support import Launch, next_power_of_2

PIECE = Launch(warps=8, stages=1, constants={"BLOCK": 2048})
MERGE = Launch(warps=1, stages=1)
TRUNCATED = Launch(warps=16, stages=1, constants={"BLOCK": 512})
TILES_OF_A_PIECE = 4
NOBODY = tl.constexpr(2147483647)


@triton.jit
def better(value, index, other, other_index):
    """The larger value; of equal ones the lower index."""
    wins = (other > value) | ((other == value) & (other_index < index))
    return tl.where(wins, other, value), tl.where(wins, other_index, index)


@triton.jit
def winner(scores, ids):
    """The largest score and the lowest index of it; scores hold no NaN."""
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, ids, NOBODY), 0)


@triton.jit
def piece_kernel(
    values, keys, codes, part_values, part_ids, width, row_stride, pieces, NOISE: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The winner of one piece of one row: among the values, or among what is left of them behind the noise."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    if NOISE:
        low, high = tl.load(keys + row * 2), tl.load(keys + row * 2 + 1)
    best, best_id, bad = tl.full([], float("-inf"), tl.float32), tl.full([], NOBODY, tl.int32), 0
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
    best, best_id = winner(tl.where(found == found, found, float("-inf")), tl.load(ids + lanes, lanes < pieces, NOBODY))
    return tl.where(bad > 0, float("nan"), best), best_id


@triton.jit
def merge_kernel(part_values, part_ids, out, out_values, pieces, width, BLOCK: tl.constexpr):
    """The winner of one row."""
    row = tl.program_id(0).to(tl.int64)
    best, best_id = merged(part_values + row * pieces, part_ids + row * pieces, pieces, BLOCK)
    tl.store(out + row, tl.minimum(best_id, width - 1).to(tl.int64))
    tl.store(out_values + row, best)


@triton.jit
def ordered(x):
    """float32 as uint32 that compare alike."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # no negative zero
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def load_logits(row, ids, width, least):
    """Logits of which those below `least` are no more."""
    x = tl.load(row + ids, ids < width, float("-inf")).to(tl.float32)
    return tl.where(x >= least, x, float("-inf"))


@triton.jit
def pivot(row, width, least, cut, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest ordered number w with at least `target` tokens, or of MASS so much of exp(logit), at w and above.

    Args:
        cut: ordered; what lies below does not count.
        target: float64 above 0.
    """
    lanes, digits = tl.arange(0, BLOCK), tl.arange(0, 8)
    found = tl.zeros([], tl.uint32)
    for level in tl.static_range(11):
        candidates = found | (digits.to(tl.uint32) << (30 - 3 * level))
        sums = tl.zeros([BLOCK, 8], tl.float64)
        for begin in range(0, width, BLOCK):
            x = load_logits(row, begin + lanes, width, least)
            place = ordered(x)
            if MASS:
                weight = tl.where(place >= cut, tl.exp(x), 0.0).to(tl.float64)
            else:
                weight = (begin + lanes < width).to(tl.float64)
            sums += tl.where(place[:, None] >= candidates[None, :], weight[:, None], 0.0)
        reach = (tl.sum(sums, 0) >= target) & (digits < (4 if level == 0 else 8))  # the first has two bits
        found = tl.max(tl.where(reach, candidates.to(tl.int64), found.to(tl.int64)), 0).to(tl.uint32)
    return found


@triton.jit(do_not_specialize=["top_k", "top_p"])
def truncated_kernel(
    scaled, least_of, top_k, top_p, keys, codes, out, thresholds, width, row_stride, BLOCK: tl.constexpr
):
    """One row's token, and a number that the smallest logit that it could have been reaches and no smaller one does.

    Args:
        least_of: float32 [rows], what min_p leaves; or None.
        keys: None draws nothing.
    """
    index = tl.program_id(0).to(tl.int64)
    row, lanes = scaled + index * row_stride, tl.arange(0, BLOCK)
    least = float("-inf")
    if least_of is not None:
        least = tl.load(least_of + index)
    count, share = tl.load(top_k + index), tl.load(top_p + index)
    cut = tl.zeros([], tl.uint32)
    if count < width:
        cut = pivot(row, width, least, cut, count.to(tl.float64), False, BLOCK)
    threshold = cut
    if share < 1:
        sums = tl.zeros([BLOCK], tl.float64)
        for begin in range(0, width, BLOCK):
            x = load_logits(row, begin + lanes, width, least)
            sums += tl.where(ordered(x) >= cut, tl.exp(x), 0.0).to(tl.float64)
        nucleus = pivot(row, width, least, cut, share * tl.sum(sums, 0), True, BLOCK)
        threshold = tl.where(nucleus > cut, nucleus, cut)
    if keys is not None:
        low, high = tl.load(keys + index * 2), tl.load(keys + index * 2 + 1)
        best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], NOBODY, tl.int32)
        for begin in range(0, width, BLOCK):
            ids = begin + lanes
            x = load_logits(row, ids, width, least)
            scores = x - log_exponential(tl.load(codes + ids, ids < width, 0), low, high)
            kept = (ordered(x) >= threshold) & (x > float("-inf"))
            here, here_id = winner(tl.where(kept, scores, float("-inf")), ids)
            best, best_id = better(best, best_id, here, here_id)
        tl.store(out + index, tl.minimum(best_id, width - 1).to(tl.int64))
    number = tl.where((threshold >> 31) != 0, threshold ^ 0x80000000, threshold ^ 0xFFFFFFFF)
    everything = float("-inf")
    tl.store(thresholds + index, tl.where(threshold == 0, everything, number.to(tl.float32, bitcast=True)))


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
            values, keys, codes, part_values, part_ids, width, values.stride(0), pieces,
            NOISE=keys is not None, TILES=TILES_OF_A_PIECE, **PIECE.options,
        )  # fmt: skip
        merge_kernel[(rows,)](
            part_values, part_ids, out, out_values, pieces, width, BLOCK=next_power_of_2(pieces), **MERGE.options
        )
    return out, out_values


def draw_truncated_triton(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor | None, codes: Tensor | None,
    log_min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `draw_truncated` on any rows.

    Args:
        scaled: float32 [rows, vocab] with the largest of each row at 0.
        top_k: int64 [rows]; at least the vocabulary's width keeps all.
        top_p: float64 [rows], above 0; 1 keeps all.
        keys: None draws nothing, and the tokens are undefined.
        log_min_p: float32 [rows]; smaller logits are not there.

    Returns:
        tokens int64 [rows], and float32 [rows], what a logit must reach to be kept.
    """
    rows = scaled.shape[0]
    scaled = scaled if scaled.stride(1) == 1 else scaled.contiguous()
    out = torch.empty(rows, dtype=torch.int64, device=scaled.device)
    limits = torch.empty(rows, dtype=torch.float32, device=scaled.device)
    if rows:
        truncated_kernel[(rows,)](
            scaled, log_min_p, top_k.contiguous(), top_p.contiguous(), keys, codes, out, limits, scaled.shape[1],
            scaled.stride(0), **TRUNCATED.options,
        )  # fmt: skip
    return out, limits
