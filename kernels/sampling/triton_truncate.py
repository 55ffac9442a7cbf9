"""Draws from the tokens that top_k and top_p keep on a GPU: four launches, without a sort or a wait for the device.

1. `peaks_kernel`: the largest logit of each piece of a row, and of each group of a piece.
2. `survey_kernel`: where top_k is small, the k-th largest of the groups' logits is at most the k-th largest of all, and
   the few tokens that reach it are listed. Of other rows tokens are counted in bins, each with its number and mass.
3. `gather_kernel`, for these other rows: bins say which of them the thresholds lie in. The best of the tokens above is
   drawn, those of these bins are listed.
4. `settle_kernel`: finds the thresholds among those listed, by comparing each with each of few and by pivots of many,
   and draws. If a list runs over (of thousands of equal logits, say), it looks at the whole row: slow, but the same.

All that decides is summed in whole numbers, so that neither the pieces nor the order in which they are done matter:
a token is a function of its row alone. No size depends on a row's content, so that a graph may hold it all.

Computed, not measured, for 151,936 tokens on an H100 (3.35 TB/s): a walk reads 0.61 MB of a row; a small top_k (to 300)
takes two walks, all else takes three. One row is 75 programs of 8 KB and their latency, some 2 us a launch, and 3 to 5
us more for the digits of pivots where over 256 are listed: about 8 to 13 us. 256 rows are 156 MB a walk: 93 us if top_k
is small, else 140 us. In the latter case each logit within the bins is an atomic addition, at 0.1 to 0.2 million per
microsecond, so flat logits may take 0.3 ms more. Beside its one to eight tiles a program reads 2 to 9 KB.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.sampling.triton_draw import NO_ID, better, merged, winner
from troupellm.kernels.sampling.triton_noise import log_exponential
from troupellm.kernels.sampling.triton_pivots import (
    BINS,
    GROUPS,
    above,
    bin_of,
    bound_of,
    candidates_at,
    compared,
    falling,
    is_narrow,
    key_of,
    mass_of,
    note,
    ordered,
    row_of,
    scaled,
    searched,
    spread_of,
    tile_at,
    unordered,
    window,
)

PIECE = {"BLOCK": 2048}
PEAKS = Launch(warps=8, stages=1, constants=PIECE)
WALK = Launch(warps=8, stages=1, constants=PIECE, registers=128)
SETTLE = Launch(warps=8, stages=1, constants={"BLOCK": 512, "FEW": 256, "STEP": 16})
LISTED = 8192
"""Tokens of a row that thresholds may lie among without a walk through all of it."""
BUSY, MOST_TILES = 1024, 8
"""Programs that keep a GPU busy; where rows have more, each goes through several tiles, and looks at its row once."""
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def peaks_kernel(
    logits, part_values, part_ids, lowest, heads, counts, masses, listed, width, row_stride, pieces, BLOCK: tl.constexpr
):
    """Of one piece: its largest logit (NaN where there is one), the first token with it, its least finite logit and
    the largest ones of its groups. The first piece sets the row's counters to 0."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups, members = tl.arange(0, GROUPS), tl.arange(0, BLOCK // GROUPS)
    ids = piece * BLOCK + members[:, None] * GROUPS + groups[None, :]
    x = tl.load(logits + row * row_stride + ids, ids < width, float("-inf"))
    bad = tl.sum(tl.sum((x != x).to(tl.int32), 0), 0)
    x = tl.where(x == x, x, float("-inf"))
    largest = tl.max(x, 0)
    best, part = tl.max(largest, 0), row * pieces + piece
    tl.store(heads + part * GROUPS + groups, largest)
    tl.store(part_values + part, tl.where(bad > 0, float("nan"), best))
    tl.store(part_ids + part, tl.min(tl.min(tl.where(x == best, ids, NO_ID), 0), 0))
    tl.store(lowest + part, tl.min(tl.min(tl.where(x > float("-inf"), x, INFINITY), 0), 0))
    if piece == 0:
        bins = tl.arange(0, BINS)
        tl.store(counts + row * BINS + bins, tl.zeros([BINS], tl.int32))
        tl.store(masses + row * BINS + bins, tl.zeros([BINS], tl.int64))
        tl.store(listed + row, 0)


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["scales", "top_k", "top_p"])
def survey_kernel(
    logits, part_values, part_ids, lowest, heads, scales, top_k, top_p, counts, masses, spreads, listing, listed,
    width, row_stride, pieces, tiles, LISTED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of some tiles: candidates listed where there are few for sure, else counted by bins. Nothing of rows that nothing
    cuts off."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, end = logits + index * row_stride, (part + 1) * tiles * BLOCK
    ids = part * tiles * BLOCK + tl.arange(0, BLOCK)
    raw = tile_at(row, ids, end, width)  # on its way while the rest is looked at
    peak, _token, factor, least = row_of(scales, part_values, part_ids, index, pieces, PIECES)
    count, share = tl.load(top_k + index), tl.load(top_p + index)
    if (factor > 0) & (tl.abs(peak) < INFINITY) & ((count < width) | (share < 1)):
        lanes, narrow = tl.arange(0, PIECES * GROUPS), is_narrow(count, width, pieces)
        of_row = tl.load(heads + index * pieces * GROUPS + lanes, lanes < pieces * GROUPS, float("-inf"))
        largest = scaled(of_row, peak, factor, least)
        if narrow:
            spread = tl.zeros([], tl.float32)
            bound = bound_of(largest, count.to(tl.int32))
        else:
            parts = tl.arange(0, PIECES)
            bottom = tl.min(tl.load(lowest + index * pieces + parts, parts < pieces, INFINITY), 0)
            depth = -tl.maximum((bottom - peak) * factor, least)
            if count >= width:
                # All tokens below this together have less mass than top_p cuts off: none has the threshold.
                total = tl.sum(tl.exp(largest), 0)  # a lower bound
                depth = tl.minimum(depth, tl.log(width / ((1 - share).to(tl.float32) * total)) + 0.1)
            spread = spread_of(depth)
            bound = tl.full([], BINS - 1, tl.int32)
            if part == 0:
                tl.store(spreads + index, spread)
        for _tile in range(tiles):
            following = tile_at(row, ids + BLOCK, end, width)
            x = scaled(raw, peak, factor, least)
            some = x > float("-inf")
            if narrow:
                note(ids, some & (falling(x) <= bound), listing + index * LISTED, listed + index, LISTED)
            else:
                place = bin_of(x, spread)
                within, below = some & (place < bound), some & (place == bound)
                if count < width:
                    to = counts + index * BINS
                    tl.atomic_add(to + place, tl.full([BLOCK], 1, tl.int32), within, sem="relaxed")
                    tl.atomic_add(to + bound, tl.sum(below.to(tl.int32), 0), sem="relaxed")
                if share < 1:
                    mass, to_mass = mass_of(x), masses + index * BINS
                    tl.atomic_add(to_mass + place, mass, within & (mass > 0), sem="relaxed")
                    tl.atomic_add(to_mass + bound, tl.sum(tl.where(below, mass, 0), 0), sem="relaxed")
            raw, ids = following, ids + BLOCK


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["scales", "top_k", "top_p", "streams", "ends"])
def gather_kernel(
    logits, part_values, part_ids, scales, top_k, top_p, counts, masses, spreads, keys, streams, ends, codes, listing,
    listed, drawn_values, drawn_ids, width, row_stride, pieces, tiles, LISTED: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of some tiles of a row whose candidates were not few for sure: the winner among those above the thresholds' bins;
    those in these bins are listed. Without codes nothing is drawn."""
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count, share = tl.load(top_k + index), tl.load(top_p + index)
    if is_narrow(count, width, pieces) == 0:
        row, end = logits + index * row_stride, (part + 1) * tiles * BLOCK
        ids = part * tiles * BLOCK + tl.arange(0, BLOCK)
        raw = tile_at(row, ids, end, width)
        peak, _token, factor, least = row_of(scales, part_values, part_ids, index, pieces, PIECES)
        best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], NO_ID, tl.int32)
        if (factor > 0) & (tl.abs(peak) < INFINITY):
            first, last, spread = tl.full([], BINS, tl.int32), tl.full([], BINS, tl.int32), tl.zeros([], tl.float32)
            if (count < width) | (share < 1):
                spread = tl.load(spreads + index)
                first, last, _limited = window(counts + index * BINS, masses + index * BINS, count, share, width)
            if codes is not None:
                low, high = key_of(keys, streams, ends, index)
            for _tile in range(tiles):
                following = tile_at(row, ids + BLOCK, end, width)
                x = scaled(raw, peak, factor, least)
                some, place = x > float("-inf"), bin_of(x, spread)
                note(ids, some & (place >= first) & (place <= last), listing + index * LISTED, listed + index, LISTED)
                if codes is not None:
                    kept = some & (place < first)
                    if tl.max(kept.to(tl.int32), 0) > 0:  # most tiles have none, and need no noise
                        scores = x - log_exponential(tl.load(codes + ids, kept, 0), low, high)
                        here, here_id = winner(tl.where(kept, scores, float("-inf")), ids)
                        best, best_id = better(best, best_id, here, here_id)
                raw, ids = following, ids + BLOCK
        if codes is not None:
            at = index * tl.num_programs(1) + part
            tl.store(drawn_values + at, best)
            tl.store(drawn_ids + at, best_id)


@triton.jit(
    do_not_specialize=["drawn_parts", "length"],
    do_not_specialize_on_alignment=["scales", "top_k", "top_p", "streams", "slots", "ends"],
)
def settle_kernel(
    logits, part_values, part_ids, scales, top_k, top_p, counts, masses, spreads, keys, streams, ends, codes, listing,
    listed, drawn_values, drawn_ids, slots, texts, out, limits, width, row_stride, pieces, drawn_parts,
    length, LISTED: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One row's token, -1 where its logits are not fit to choose from, put behind what the row says where there are
    texts; and a number that the smallest logit that it could have been reaches and no smaller one does."""
    index = tl.program_id(0).to(tl.int64)
    peak, token, factor, least = row_of(scales, part_values, part_ids, index, pieces, PIECES)
    sound = tl.abs(peak) < INFINITY
    threshold = tl.zeros([], tl.uint32)
    if sound & (factor > 0):
        row, list_of_row = logits + index * row_stride, listing + index * LISTED
        count, share = tl.load(top_k + index), tl.load(top_p + index)
        first, last, spread = tl.zeros([], tl.int32), tl.full([], BINS - 1, tl.int32), tl.zeros([], tl.float32)
        above_count, above_mass, total = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.zeros([], tl.int64)
        limited = tl.full([], 1, tl.int1)
        best, best_id = tl.full([], float("-inf"), tl.float32), tl.full([], NO_ID, tl.int32)
        if is_narrow(count, width, pieces) == 0:
            if (count < width) | (share < 1):
                spread = tl.load(spreads + index)
                first, last, limited = window(counts + index * BINS, masses + index * BINS, count, share, width)
            if count < width:
                above_count = above(counts + index * BINS, first)
            if share < 1:
                above_mass, total = above(masses + index * BINS, first), above(masses + index * BINS, BINS)
            if codes is not None:
                at = index * drawn_parts
                best, best_id = merged(drawn_values + at, drawn_ids + at, drawn_parts, PIECES)
        number = tl.load(listed + index)
        compact = number <= LISTED
        number = tl.where(compact, number, width)
        if (number > 0) & (number <= FEW):
            threshold = compared(
                row, list_of_row, number, compact, peak, factor, least, spread, first, last, count, share, above_count,
                above_mass, total, limited, FEW, STEP,
            )  # fmt: skip
        elif number > 0:
            threshold = searched(
                row, list_of_row, number, compact, peak, factor, least, spread, first, last, count, share, width,
                above_count, above_mass, total, limited, BLOCK,
            )  # fmt: skip
        if codes is not None:
            low, high = key_of(keys, streams, ends, index)
            for begin in range(0, number, BLOCK):
                ids, x = candidates_at(
                    row, list_of_row, begin, number, compact, peak, factor, least, spread, first, last, BLOCK
                )
                kept = (ordered(x) >= threshold) & (x > float("-inf"))
                scores = x - log_exponential(tl.load(codes + ids, kept, 0), low, high)
                here, here_id = winner(tl.where(kept, scores, float("-inf")), ids)
                best, best_id = better(best, best_id, here, here_id)
            token = best_id
    token = tl.minimum(token, width - 1)
    tl.store(out + index, tl.where(sound, token, -1).to(tl.int64))
    tl.store(limits + index, unordered(threshold))
    if texts is not None:
        tl.store(texts + tl.load(slots + index) * length + tl.load(ends + index), tl.where(sound, token, 0))


def row_bytes(width: int) -> int:
    """Device memory that `truncated_triton` takes for a row of this many logits, its results included."""
    pieces = triton.cdiv(width, PIECE["BLOCK"])
    return int(4 * (LISTED + 3 * BINS.value + pieces * (5 + GROUPS.value)) + 20)


def truncated_triton(
    logits: Tensor, top_k: Tensor, top_p: Tensor, codes: Tensor | None = None, *, keys: Tensor | None = None,
    scales: Tensor | None = None, streams: Tensor | None = None, ends: Tensor | None = None,
    slots: Tensor | None = None, texts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token per row from the tokens that top_k and top_p keep.

    Args:
        logits: float32 [rows, vocab]; left as they are.
        top_k: int64 [rows], above 0; at least the vocabulary's width keeps all.
        top_p: float64 [rows], above 0; 1 keeps all.
        codes: `noise.token_codes`; None draws nothing, and tokens are the likeliest ones.
        keys: `noise.position_keys`, int32 [rows, 2]; None where there are streams and ends, as of `step_ends.finish`.
        scales: as of `step_ends.Draws`; None is a temperature of 1 without min_p.
        slots, texts: as of `step_ends.finish`, which puts tokens there; None puts them nowhere.

    Returns:
        Tokens int64 [rows], -1 where the logits are not fit to choose from; and float32 [rows], what a logit, less the
        row's largest and over the temperature, must reach to be kept.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, width = logits.shape
    pieces = triton.cdiv(width, PIECE["BLOCK"])

    def made(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    out, limits = made(torch.int64), made(torch.float32)
    if not rows:
        return out, limits
    parts, lowest = (made(torch.float32, pieces), made(torch.int32, pieces)), made(torch.float32, pieces)
    heads, spreads = made(torch.float32, pieces * GROUPS.value), made(torch.float32)
    bins = made(torch.int32, BINS.value), made(torch.int64, BINS.value)
    listing, listed = made(torch.int32, LISTED), made(torch.int32)
    tiles = min(max(rows * pieces // BUSY, 1), MOST_TILES)
    walks, shape = triton.cdiv(pieces, tiles), (width, logits.stride(0), pieces)
    drawn = (None, None) if codes is None else (made(torch.float32, walks), made(torch.int32, walks))
    sizes = {"LISTED": LISTED, "PIECES": next_power_of_2(pieces)}
    options, noise = (scales, top_k, top_p), (keys, streams, ends, codes)
    peaks_kernel[(rows, pieces)](logits, *parts, lowest, heads, *bins, listed, *shape, **PEAKS.options)
    survey_kernel[(rows, walks)](
        logits, *parts, lowest, heads, *options, *bins, spreads, listing, listed, *shape, tiles, **sizes,
        **WALK.options,
    )  # fmt: skip
    gather_kernel[(rows, walks)](
        logits, *parts, *options, *bins, spreads, *noise, listing, listed, *drawn, *shape, tiles, **sizes,
        **WALK.options,
    )  # fmt: skip
    settle_kernel[(rows,)](
        logits, *parts, *options, *bins, spreads, *noise, listing, listed, *drawn, slots, texts, out, limits, *shape,
        walks, 0 if texts is None else texts.shape[1], **sizes, **SETTLE.options,
    )  # fmt: skip
    return out, limits
