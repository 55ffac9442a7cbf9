"""The inner loop that decode and extend share: online softmax over the tiles of one row's keys.

Rows of a product are (query token, head of one KV head's group) pairs. The tensor cores get at least 16 of them, and a
tile of keys is read once for the whole group. The block ids of the next tile are loaded while this one is computed: a
table load that the tile's own loads wait for would cost the pipeline its stages.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from troupellm.kernels.common.triton_language import LOG2_E, cast, dot, not_finite, tanh

NEVER = tl.constexpr(-1.0e30)
"""Initial value of a running maximum: finite, because -inf minus -inf is NaN."""


@triton.jit
def row_tiles(context, queries, window, TILE: tl.constexpr):
    """First tile that any of a row's last `queries` tokens sees, and the tile past the last; never an empty range.

    A row without keys has one tile, in which nothing is seen: it becomes zeros without a case of its own.
    """
    first = tl.where(window > 0, tl.maximum(context - queries + 1 - window, 0) // TILE, 0)
    last = (context + TILE - 1) // TILE
    return first, tl.maximum(last, first + 1)


@triton.jit
def block_ids(table, tile, oldest, context, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Block ids of the tile's keys [TILE], or one for all of them if a block holds whole tiles; 0 for unread keys."""
    begin = tile * TILE
    if PAGE % TILE == 0:
        return tl.load(table + begin // PAGE, mask=(begin + TILE > oldest) & (begin < context), other=0)
    else:  # the compiler would give code behind an early return another type
        position = begin + tl.arange(0, TILE)
        return tl.load(table + position // PAGE, mask=(position >= oldest) & (position < context), other=0)


@triton.jit
def attend(
    query,
    acc,
    maximum,
    total,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    begin,
    end,
    oldest,
    context,
    limits,
    floors,
    base,
    nodes,
    block_stride,
    pre_scale,
    post_scale,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """Go on with a softmax over tiles [begin, end).

    Args:
        query: [rows, DIM], zero beyond HEAD_DIM.
        acc, maximum, total: float32 [rows, DIM], [rows], [rows]; maximum in units of log 2.
        keys, values: pointers to the KV head within block 0.
        key_scales, value_scales: the same memory as float32, where each row ends with its scale (int8), else None.
        oldest: the first position that any row sees; a block that lies before it may have been given back.
        context: the first position behind the row's keys.
        limits: int32 [rows], the first position that a row does not see.
        floors: int32 [rows], the first position that a row sees through a window, where the tokens are not those
            behind each other; None is WINDOW before `limits`.
        base, nodes: where a tree of drafts begins, and int64 [rows], which of its nodes a row sees, as bits; None is
            all.
        ROW: elements from one key to the next: HEAD_DIM, or more where a scale lies behind it.
        MASKED: False where every row sees all keys of all tiles.
        GUARDED: rows see different keys: a value that is no finite number makes those NaN that see it, and no others,
            although 0 times such a value is no 0.
    """
    offsets, dims = tl.arange(0, TILE), tl.arange(0, DIM)
    block = block_ids(table, begin, oldest, context, PAGE, TILE)
    for tile in range(begin, end):
        position = tile * TILE + offsets
        place = position % PAGE
        there = block.to(tl.int64) * block_stride + place * ROW + tl.zeros([TILE], tl.int64)
        key_at, value_at = keys + there[None, :] + dims[:, None], values + there[:, None] + dims[None, :]
        if MASKED:
            inside = (position >= oldest) & (position < context)
            key = tl.load(key_at, mask=inside[None, :] & (dims[:, None] < HEAD_DIM), other=0.0)
            value = tl.load(value_at, mask=inside[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
        elif HEAD_DIM != DIM:
            key = tl.load(key_at, mask=dims[:, None] < HEAD_DIM, other=0.0)
            value = tl.load(value_at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        else:
            key, value = tl.load(key_at), tl.load(value_at)
        if key_scales is not None:
            scale_at = there // 4 + HEAD_DIM // 4
            inside = (position >= oldest) & (position < context)
            key_scale = tl.load(key_scales + scale_at, mask=inside, other=0.0)
            value_scale = tl.load(value_scales + scale_at, mask=inside, other=0.0)
        block = block_ids(table, tile + 1, oldest, context, PAGE, TILE)

        scores = dot(query, key.to(query.dtype), tl.zeros([query.shape[0], TILE], tl.float32)) * pre_scale
        if key_scales is not None:
            scores *= key_scale[None, :]
        if SOFT_CAP:
            scores = tanh(scores) * post_scale
        if MASKED:
            seen = position[None, :] < limits[:, None]
            if WINDOW > 0:
                if floors is not None:
                    seen = seen & (position[None, :] >= floors[:, None])
                else:
                    seen = seen & (position[None, :] >= limits[:, None] - WINDOW)
            if nodes is not None:
                behind = position - base
                bits = (nodes[:, None] >> tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)[None, :]) & 1
                seen = seen & ((behind[None, :] < 0) | (bits == 1))
            scores = tl.where(seen, scores, float("-inf"))
            if GUARDED:
                if value_scales is not None:
                    bad = value_scale * 0.0 != 0.0
                    value_scale = tl.where(bad, 0.0, value_scale)
                else:
                    value = value.to(query.dtype)
                    bad = not_finite(value)
                    value = tl.where(bad[:, None], 0.0, value)
                scores = tl.where(seen & bad[None, :], float("nan"), scores)
        higher = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(maximum - higher)
        maximum, total = higher, total * shrink + tl.sum(weights, 1)
        if value_scales is not None:
            weights *= value_scale[None, :]
        acc = dot(cast(weights, query.dtype), value.to(query.dtype), acc * shrink[:, None])
    return acc, maximum, total


@triton.jit
def finish(acc, maximum, total, sinks, heads, valid):
    """acc / total, with each head's sink in the denominator; zeros where nothing was seen."""
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=0.0)
        total += tl.exp2(sink * LOG2_E - maximum)
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
