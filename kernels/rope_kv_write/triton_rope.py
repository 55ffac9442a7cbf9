"""Norms of heads, rotation and the write to the paged cache in one launch on a GPU.

A program holds some heads of one token, of queries, keys or values, as the left and the right numbers of the pairs that
are turned and the rest behind them. So nothing is read twice, and neighbours are no harder than halves.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from troupellm.kernels.common.triton import Launch, next_power_of_2
from troupellm.kernels.common.triton_language import cast
from troupellm.kernels.common.triton_rows import clamped, largest, quantized, row_scale
from troupellm.kernels.rms_norm import rms_norm
from troupellm.kernels.rope_kv_write import HeadNorms

HEADS_TOGETHER = 8


@triton.jit
def places(HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Places of the left and the right numbers of pairs within a head, int32 [HALF_BLOCK] each."""
    pair = tl.arange(0, HALF_BLOCK)
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1
    else:
        return pair, pair + HALF


@triton.jit
def load_heads(
    source, head, head_stride, heads, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """float32: lefts and rights [heads, HALF_BLOCK], rest [heads, REST_BLOCK]."""
    left, right = places(HALF, HALF_BLOCK, INTERLEAVED)
    turned = (head < heads)[:, None] & (tl.arange(0, HALF_BLOCK) < HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)
    behind = (head < heads)[:, None] & (rest < HEAD_DIM)[None, :]
    begins = source + head[:, None] * head_stride
    return (
        tl.load(begins + left[None, :], turned, 0.0).to(tl.float32),
        tl.load(begins + right[None, :], turned, 0.0).to(tl.float32),
        tl.load(begins + rest[None, :], behind, 0.0).to(tl.float32),
    )


@triton.jit
def weighed(x, scale, weight, there, dtype: tl.constexpr, kind: tl.constexpr):
    """A part of normed heads: rounded before a weight of its own type, and behind any, as the reference has it."""
    factors = tl.load(weight, there, 0.0).to(tl.float32)
    scaled = x * scale[:, None]
    if kind == dtype:
        scaled = cast(scaled, dtype).to(tl.float32)
    return cast(scaled * factors[None, :], dtype).to(tl.float32)


@triton.jit
def turned_heads(
    left, right, rest, norm, eps, cos, sin, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads behind their norm, where there is one, and their rotation."""
    pair = tl.arange(0, HALF_BLOCK)
    if norm is not None:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        at_left, at_right = places(HALF, HALF_BLOCK, INTERLEAVED)
        at_rest = 2 * HALF + tl.arange(0, REST_BLOCK)
        kind: tl.constexpr = norm.dtype.element_ty
        left = weighed(left, scale, norm + at_left, pair < HALF, dtype, kind)
        right = weighed(right, scale, norm + at_right, pair < HALF, dtype, kind)
        rest = weighed(rest, scale, norm + at_rest, at_rest < HEAD_DIM, dtype, kind)
    if HALF > 0:
        c = tl.load(cos + pair, pair < HALF, 0.0).to(tl.float32)[None, :]
        s = tl.load(sin + pair, pair < HALF, 0.0).to(tl.float32)[None, :]
        left, right = left * c - right * s, right * c + left * s
    return left, right, rest


@triton.jit
def store_parts(
    out, begins, there, left, right, rest, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write heads; parts are of the type of `out` already."""
    at_left, at_right = places(HALF, HALF_BLOCK, INTERLEAVED)
    turned = there[:, None] & (tl.arange(0, HALF_BLOCK) < HALF)[None, :]
    at_rest = 2 * HALF + tl.arange(0, REST_BLOCK)
    tl.store(out + begins[:, None] + at_left[None, :], left, turned)
    tl.store(out + begins[:, None] + at_right[None, :], right, turned)
    tl.store(out + begins[:, None] + at_rest[None, :], rest, there[:, None] & (at_rest < HEAD_DIM)[None, :])


@triton.jit
def write_heads(
    cache, scales, rows, there, left, right, rest, dtype: tl.constexpr, ROW: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Put heads into the type of the cache, over the type `dtype` of the model, and write them to its rows."""
    kind: tl.constexpr = cache.dtype.element_ty
    left, right, rest = cast(left, dtype), cast(right, dtype), cast(rest, dtype)
    if kind != dtype:
        left, right, rest = left.to(tl.float32), right.to(tl.float32), rest.to(tl.float32)
        if kind == tl.int8:
            inside = tl.maximum(largest(left), largest(right), propagate_nan=tl.PropagateNan.ALL)
            scale = row_scale(tl.maximum(inside, largest(rest), propagate_nan=tl.PropagateNan.ALL), kind)
            tl.store(scales + rows * (ROW // 4) + HEAD_DIM // 4, scale, there)
            left, right, rest = (
                quantized(left, scale, kind),
                quantized(right, scale, kind),
                quantized(rest, scale, kind),
            )
        else:
            left, right, rest = cast(clamped(left), kind), cast(clamped(right), kind), cast(clamped(rest), kind)
    store_parts(
        cache, rows * ROW, there, left, right, rest, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows_of", "tokens"])
def rope_kv_write_kernel(
    query, key, value, query_norm, key_norm, cos, sin, rows_of, out, key_cache, value_cache, key_scales, value_scales,
    query_stride, query_head, key_stride, key_head, value_stride, value_head, angle_stride, tokens, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROW: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: first come the programs of queries, then those of keys, then those of values.

    Args:
        query, key, value: token t, head h begins at t * stride + h * head.
        rows_of: int64 [tokens * KV_HEADS], rows of the caches [*, ROW].
        key_scales, value_scales: the caches as float32, of int8 alone.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes = tl.arange(0, BLOCK_H)
    QUERY_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_TILES: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    dtype: tl.constexpr = query.dtype.element_ty
    if tile < QUERY_TILES:
        head = tile * BLOCK_H + lanes
        left, right, rest = load_heads(
            query + token * query_stride, head, query_head, HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK
        )
        left, right, rest = turned_heads(
            left, right, rest, query_norm, eps, cos + token * angle_stride, sin + token * angle_stride, dtype,
            HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
        store_parts(
            out, (token * HEADS + head) * HEAD_DIM, head < HEADS, cast(left, dtype), cast(right, dtype),
            cast(rest, dtype), HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        if token < tokens:
            head = (tile - QUERY_TILES) % max(KV_TILES, 1) * BLOCK_H + lanes
            there = head < KV_HEADS
            rows = tl.load(rows_of + token * KV_HEADS + head, there, 0)
            if tile < QUERY_TILES + KV_TILES:
                left, right, rest = load_heads(
                    key + token * key_stride, head, key_head, KV_HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK,
                    REST_BLOCK,
                )  # fmt: skip
                left, right, rest = turned_heads(
                    left, right, rest, key_norm, eps, cos + token * angle_stride, sin + token * angle_stride, dtype,
                    HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK, REST_BLOCK,
                )  # fmt: skip
                write_heads(
                    key_cache, key_scales, rows, there, left, right, rest, dtype, ROW, HEAD_DIM, HALF, INTERLEAVED,
                    HALF_BLOCK, REST_BLOCK,
                )  # fmt: skip
            else:
                left, right, rest = load_heads(
                    value + token * value_stride, head, value_head, KV_HEADS, HEAD_DIM, HALF, INTERLEAVED, HALF_BLOCK,
                    REST_BLOCK,
                )  # fmt: skip
                write_heads(
                    value_cache, value_scales, rows, there, left, right, rest, dtype, ROW, HEAD_DIM, HALF,
                    INTERLEAVED, HALF_BLOCK, REST_BLOCK,
                )  # fmt: skip


def head_launch(head_dim: int, half: int) -> Launch:
    """Tiles for heads of `head_dim` numbers, of which 2 * half are rotated."""
    constants = {
        "HALF_BLOCK": next_power_of_2(max(half, 1)),
        "REST_BLOCK": next_power_of_2(max(head_dim - 2 * half, 1)),
        "BLOCK_H": HEADS_TOGETHER,
    }
    return Launch(warps=4, stages=1, constants=constants)


def rope_kv_write_triton(
    qkv: Tensor, heads: int, caches: tuple[Tensor, Tensor], rows: Tensor, *, norms: HeadNorms | None = None,
    angles: tuple[Tensor, Tensor] | None = None, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """As `rope_kv_write`; queries are contiguous."""
    turned, size = (heads + qkv.shape[1]) // 2, qkv.shape[2]
    query, key, value = qkv[:, :heads], qkv[:, heads:turned], qkv[:, turned:]
    query_norm, key_norm = (None, None) if norms is None else (norms.query, norms.key)
    eps = 0.0 if norms is None else norms.eps
    if query_norm is not None and query_norm.shape[0] != size:  # a norm over all heads needs all of them first
        query = rms_norm(query.flatten(1), query_norm, eps).view(query.shape)
        query_norm = None
    if key_norm is not None and key_norm.shape[0] != size:
        key, key_norm = rms_norm(key.flatten(1), key_norm, eps).view(key.shape), None
    return launch(query, key, value, query_norm, key_norm, eps, angles, caches, rows, interleaved=interleaved)


def launch(
    query: Tensor, key: Tensor, value: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, eps: float,
    angles: tuple[Tensor, Tensor] | None, caches: tuple[Tensor, Tensor], rows: Tensor, *, interleaved: bool,
) -> Tensor:  # fmt: skip
    """One launch over queries, keys and values [rows, heads, head_dim] of any strides but the last; queries."""
    (count, heads, size), kv_heads = query.shape, key.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not count:
        return out
    cos, sin = (query, query) if angles is None else angles
    half = 0 if angles is None else cos.shape[-1]
    scales = [cache.view(torch.float32) if cache.dtype == torch.int8 else None for cache in caches]
    made = head_launch(size, half)
    block = made.constants["BLOCK_H"]
    grid = (count, triton.cdiv(heads, block) + 2 * triton.cdiv(kv_heads, block))
    rope_kv_write_kernel[grid](
        query, key, value, query_norm, key_norm, cos, sin, rows, out, *caches, *scales,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        cos.stride(0), rows.shape[0] // max(kv_heads, 1), eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=size, HALF=half, INTERLEAVED=interleaved,
        ROW=caches[0].shape[-1], **made.options,
    )  # fmt: skip
    return out


def rope_triton(x: Tensor, angles: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """As `rope`: a launch without keys and values."""
    nothing, nowhere = x[:, :0], torch.empty(0, dtype=torch.int64, device=x.device)
    return launch(x, nothing, nothing, None, None, 0.0, angles, (x, x), nowhere, interleaved=interleaved)


def kv_write_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Tensor) -> None:
    """As `kv_write`: a launch without queries."""
    launch(key[:, :0], key, value, None, None, 0.0, None, (key_cache, value_cache), rows, interleaved=False)
