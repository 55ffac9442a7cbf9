"""Pieces of the kernels that cut rows off by top_k and top_p: bins, masses, lists and pivots.

Counts and masses are whole numbers, so that a sum of them is the same in any order and over any pieces of a row.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.sampling.triton_draw import merged
from troupellm.kernels.sampling.triton_noise import position_key

BINS = tl.constexpr(512)
"""Number of bins of equal width, from a row's largest logit down; the last bin also has everything below."""
GROUPS = tl.constexpr(8)
"""Groups of a piece of a row, each with its own largest logit."""
GROUPS_EACH = tl.constexpr(2)
"""There must be this many groups for each of the top_k tokens, or else few groups hold many of these."""
DEEPEST = tl.constexpr(64.0)
"""Depth of the lowest bin, even if large numbers mask some logits; everything below it has no mass at all."""
UNIT = tl.constexpr(2.0**42)
"""The mass of a row's likeliest token. Rows of up to a million tokens stay far below 2**63."""


@triton.jit
def ordered(x):
    """float32 as uint32 that compare alike."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # no negative zero
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def unordered(place):
    """The float32 of a number of `ordered`; 0 is smaller than all, and becomes -inf."""
    bits = tl.where((place >> 31) != 0, place ^ 0x80000000, place ^ 0xFFFFFFFF)
    return tl.where(place == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def mass_of(x):
    """exp(x) of numbers not above 0, in int64."""
    return (tl.exp(x) * UNIT).to(tl.int64)


@triton.jit
def bin_of(x, spread):
    """Falls as x rises; the last for -inf and all that is below the others."""
    return tl.minimum(tl.maximum(x, -2 * DEEPEST) * -spread, BINS - 1).to(tl.int32)


@triton.jit
def row_of(scales, part_values, part_ids, row, pieces, PIECES: tl.constexpr):
    """A row's largest logit and the first token with it, one over its temperature, and log of its min_p."""
    peak, token = merged(part_values + row * pieces, part_ids + row * pieces, pieces, PIECES)
    if scales is not None:
        return peak, token, tl.load(scales + row * 2), tl.load(scales + row * 2 + 1)
    else:
        return peak, token, tl.full([], 1.0, tl.float32), tl.full([], float("-inf"), tl.float32)


@triton.jit
def key_of(keys, streams, ends, row):
    """The two words of a row's draw."""
    if keys is not None:
        return tl.load(keys + row * 2), tl.load(keys + row * 2 + 1)
    else:
        return position_key(tl.load(streams + row), tl.load(ends + row))


@triton.jit
def tile_at(row, ids, end, width):
    """Logits of BLOCK tokens; those from `end` on belong to the next program, or to none."""
    return tl.load(row + ids, (ids < end) & (ids < width), float("-inf"))  # in fours, as one bound would not be


@triton.jit
def scaled(logits, peak, factor, least):
    """Logits less the largest one, over the temperature; -inf below the bound of min_p."""
    x = (logits - peak) * factor
    return tl.where(x >= least, x, float("-inf"))


@triton.jit
def is_narrow(count, width, pieces):
    """True if the largest logits of groups alone show the few tokens that contain the top_k ones."""
    return (count < width) & (count * GROUPS_EACH <= pieces * GROUPS)


@triton.jit
def note(ids, wanted, listing, listed, LISTED: tl.constexpr):
    """Put tokens on a row's list, in no order; beyond its end they are only counted."""
    number = tl.sum(wanted.to(tl.int32), 0)
    if number > 0:
        places = tl.atomic_add(listed, number, sem="relaxed") + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(listing + places, ids, wanted & (places < LISTED))


@triton.jit
def spread_of(depth):
    """Bins per unit of logits that reach so far down."""
    return (BINS - 1) / tl.minimum(tl.maximum(depth, 1e-20), DEEPEST)


@triton.jit
def falling(x):
    """The first 18 bits of numbers that fall as x rises: its sign, its exponent and half of the rest."""
    return ((ordered(x) ^ 0xFFFFFFFF) >> 14).to(tl.int32)


@triton.jit
def reached(bins, count):
    """The first bin by which there are `count`, or their number; and how many are before it."""
    lanes = tl.arange(0, BINS)
    found = tl.min(tl.where(tl.cumsum(bins, 0) >= count, lanes, BINS), 0)
    return found, tl.sum(tl.where(lanes < found, bins, 0), 0)


@triton.jit
def bound_of(heads, count):
    """Largest value of `falling` among the `count` largest numbers; all numbers count if there are fewer."""
    some, place = heads > float("-inf"), falling(heads)
    digit, before = reached(tl.histogram(place >> 9, BINS, some), count)
    same = some & ((place >> 9) == digit)
    rest, _ = reached(tl.histogram(place & 511, BINS, same), count - before)
    return (digit << 9) + rest


@triton.jit
def window(counts, masses, count, share, width):
    """Which bins both thresholds lie in.

    Args:
        counts, masses: int32 and int64 [BINS] of a row; counts are read where count < width, masses where share < 1.

    Returns:
        The first of these bins, which is BINS where there is no threshold, and the last; whether the row has as many as
        `count` tokens at all.
    """
    lanes = tl.arange(0, BINS)
    inside = tl.full([], BINS, tl.int32)
    if count < width:
        inside = tl.min(tl.where(tl.cumsum(tl.load(counts + lanes), 0) >= count, lanes, BINS), 0)
    first = inside
    if share < 1:
        mass = tl.load(masses + lanes)
        # Lower bound of the nucleus' share of the mass that top_k leaves.
        surely = share * tl.sum(tl.where(lanes < inside, mass, 0), 0).to(tl.float64)
        first = tl.min(tl.where(tl.cumsum(mass, 0).to(tl.float64) >= surely, lanes, BINS), 0)
    return first, tl.where(inside < BINS, inside, first), inside < BINS


@triton.jit
def above(bins, end):
    """The sum of the bins before `end`, int64."""
    lanes = tl.arange(0, BINS)
    return tl.sum(tl.load(bins + lanes, lanes < end, 0).to(tl.int64), 0)


@triton.jit
def candidates_at(row, listing, begin, length, compact, peak, factor, least, spread, first, last, BLOCK: tl.constexpr):
    """BLOCK tokens, of a list or of a whole row, and their numbers: -inf outside of the bins first..last."""
    at = begin + tl.arange(0, BLOCK)
    there = at < length
    ids = tl.where(compact, tl.load(listing + at, at < tl.where(compact, length, 0), 0), at)
    x = scaled(tl.load(row + ids, there, float("-inf")), peak, factor, least)
    place = bin_of(x, spread)
    return ids, tl.where((place >= first) & (place <= last), x, float("-inf"))


@triton.jit
def pivot(
    row,
    listing,
    length,
    compact,
    peak,
    factor,
    least,
    spread,
    first,
    last,
    cut,
    base,
    target,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest ordered number w with `target` tokens, or of MASS so much of it, at w and above; 0 where none has.

    Its digits are found from the highest on, three bits at a walk through the candidates.

    Args:
        cut: ordered; tokens below it do not count.
        base: int64, the mass above all candidates.
        target: float64 above 0.
    """
    digits = tl.arange(0, 8)
    found = tl.zeros([], tl.uint32)
    for level in range(11):
        options = found | (digits.to(tl.uint32) << (30 - 3 * level))
        sums = tl.zeros([BLOCK, 8], tl.int64)
        for begin in range(0, length, BLOCK):
            _, x = candidates_at(row, listing, begin, length, compact, peak, factor, least, spread, first, last, BLOCK)
            place = ordered(x)
            counted = (place >= cut) & (x > float("-inf"))
            weight = tl.where(counted, mass_of(x), 0) if MASS else counted.to(tl.int64)
            sums += tl.where(place[:, None] >= options[None, :], weight[:, None], 0)
        reach = ((tl.sum(sums, 0) + base).to(tl.float64) >= target) & (digits < tl.where(level == 0, 4, 8))
        found = tl.max(tl.where(reach, options.to(tl.int64), found.to(tl.int64)), 0).to(tl.uint32)
    return found


@triton.jit
def searched(
    row,
    listing,
    length,
    compact,
    peak,
    factor,
    least,
    spread,
    first,
    last,
    count,
    share,
    width,
    above_count,
    above_mass,
    total,
    limited,
    BLOCK: tl.constexpr,
):
    """A number that the smallest candidate that stays reaches, ordered, and no smaller one does; of any candidates.

    Args:
        total: int64, the mass of the row; of no account where it is `limited` to what top_k leaves.
    """
    found = tl.zeros([], tl.uint32)
    if count < width:
        found = pivot(
            row,
            listing,
            length,
            compact,
            peak,
            factor,
            least,
            spread,
            first,
            last,
            found,
            above_count,
            count.to(tl.float64),
            False,
            BLOCK,
        )
    if share < 1:
        if limited:
            total = above_mass
            for begin in range(0, length, BLOCK):
                _ids, x = candidates_at(
                    row, listing, begin, length, compact, peak, factor, least, spread, first, last, BLOCK
                )
                total += tl.sum(tl.where(ordered(x) >= found, mass_of(x), 0), 0)
        nucleus = pivot(
            row,
            listing,
            length,
            compact,
            peak,
            factor,
            least,
            spread,
            first,
            last,
            found,
            above_mass,
            share * total.to(tl.float64),
            True,
            BLOCK,
        )
        found = tl.where(nucleus > found, nucleus, found)
    return found


@triton.jit
def compared(
    row,
    listing,
    length,
    compact,
    peak,
    factor,
    least,
    spread,
    first,
    last,
    count,
    share,
    above_count,
    above_mass,
    total,
    limited,
    MOST: tl.constexpr,
    STEP: tl.constexpr,
):
    """As `searched`, of at most MOST candidates: each is compared with each, which takes one walk instead of twenty."""
    _ids, x = candidates_at(row, listing, 0, length, compact, peak, factor, least, spread, first, last, MOST)
    place, before, heavier = ordered(x), tl.zeros([MOST], tl.int32), tl.zeros([MOST], tl.int64)
    for begin in range(0, length, STEP):
        _others, y = candidates_at(row, listing, begin, length, compact, peak, factor, least, spread, first, last, STEP)
        greater = ordered(y)[None, :] > place[:, None]
        before += tl.sum(greater.to(tl.int32), 1)
        heavier += tl.sum(tl.where(greater, mass_of(y)[None, :], 0), 1)
    kept = (x > float("-inf")) & (before + above_count < count)
    if share < 1:
        if limited:
            total = above_mass + tl.sum(tl.where(kept, mass_of(x), 0), 0)
        kept = kept & ((heavier + above_mass).to(tl.float64) < share * total.to(tl.float64))
    return tl.min(tl.where(kept, place.to(tl.int64), 0xFFFFFFFF), 0).to(tl.uint32)
