"""The compiled path of paged attention: alone, or with all operations between a layer's two products."""

import functools
import weakref
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels import cpp, kv_quant
from troupellm.kernels.cpp import checks, guard
from troupellm.kernels.cpp.checks import check, require
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.rope_kv_write.kv_write import kv_rows, kv_write
from troupellm.kernels.rope_kv_write.kv_write_reference import kv_write_reference
from troupellm.kernels.rope_kv_write.rope_reference import rope_reference

LANES = 16
MAX_HEAD_DIM, MAX_LATENT = 256, 1024
"""Limits for heads whose keys and values are written in the same call, and for latent vectors."""
CELLS = {torch.float32: 0, torch.int8: 1, kv_quant.FP8: 2}
"""Types of caches, see `kernels.kv_quant`."""

ROUNDED = 0.006
"""Largest difference from the reference over a cache in eight bits, relative to the largest result. Queries and weights
may be rounded to bfloat16 (`kernels.kv_quant`), each by up to 2^-9; scores near 1 add as much again."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Rotation:
    """Norm and rotation of queries and keys. norms: of queries and keys, each [head_dim], or None."""

    norms: Pair | None
    eps: float
    rotary_dim: int
    """Number of a head's values that are rotated, the first half of them with the second; 0 is none."""


class CppAttention:
    """A layer's attention in the form of compiled code: `Heads` of parts.h."""

    __slots__ = (
        "_caches",
        "_function",
        "_held",
        "_numbers",
        "half",
        "head_dim",
        "num_heads",
        "num_kv_heads",
        "pointer",
    )

    def __init__(
        self,
        function: cpp.Function,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        """
        Args:
            sinks: float32 [heads].

        Raises:
            RefusedCall: sizes that do not fit each other, or that the compiled code does not take.
        """
        rotation = rotation or Rotation(None, 0.0, 0)
        self._function, self.num_heads, self.num_kv_heads = function, num_heads, num_kv_heads
        self.head_dim, self.half = head_dim, rotation.rotary_dim // 2
        self._caches: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None
        require(num_kv_heads > 0 and num_heads % num_kv_heads == 0, f"{num_heads} heads over {num_kv_heads} KV heads")
        require(head_dim % LANES == 0 and 0 < head_dim <= MAX_LATENT, f"heads of {head_dim} numbers")
        require(0 <= rotation.rotary_dim <= head_dim, f"{rotation.rotary_dim} rotated numbers of {head_dim}")
        if sinks is not None:
            check("sinks", sinks.contiguous(), torch.float32, num_heads)
        for norm in rotation.norms or ():
            check("a norm of heads", norm.contiguous(), torch.float32, head_dim)
        self._held = [
            None if part is None else part.contiguous() for part in (sinks, *(rotation.norms or (None, None)))
        ]
        numbers = np.array([scale, softcap, rotation.eps]).view(np.int64).tolist()
        addresses = [0 if part is None else part.data_ptr() for part in self._held]
        sizes = [num_heads, num_kv_heads, head_dim, self.half]
        self._numbers = np.array([*sizes, *numbers, *addresses], dtype=np.int64)
        self.pointer = self._numbers.ctypes.data

    def attend(self, query: Tensor, caches: Pair, plan: AttentionPlan) -> Tensor:
        """Attention to keys and values that are in the cache.

        Args:
            query: [tokens, heads, head_dim], heads contiguous.
            caches: keys and values [blocks, kv_heads, block_size, head_dim], of a type in `CELLS`.

        Returns:
            [tokens, heads, head_dim], contiguous; 0 behind the tokens of the plan.

        Raises:
            RefusedCall: a tensor of another type or shape, or a plan that leads out of the cache.
        """
        size = self.head_dim
        heads = (self.num_heads, size)
        beside = query.dim() == 3 and query.stride(2) == 1 and (query.stride(1) == size or heads[0] == 1)
        if not beside or query.shape[1:] != heads or query.dtype != torch.float32 or not query.is_cpu:
            checks.refuse("query", query, torch.float32, ("tokens", *heads), "heads")
        out = self._result(query.shape[0], plan.num_tokens)
        self._call(query, query.stride(0), caches, plan, None, None, out)
        return out.view(query.shape)

    def write_and_attend(
        self, projected: Tensor, caches: Pair, plan: AttentionPlan, rows: Tensor, angles: Pair | None
    ) -> Tensor:
        """Norm and rotation of queries and keys, the writing of keys and values, and the attention.

        Args:
            projected: [rows, (heads + 2 * kv_heads) * head_dim], contiguous; queries and keys are changed in place.
            rows: int64 [tokens * kv_heads], from `kv_rows`; there may be more rows than tokens.
            angles: cosines and sines [rows, 1, rotary_dim / 2], contiguous; None is no rotation.

        Returns:
            [rows, heads * head_dim]; 0 behind the tokens.

        Raises:
            RefusedCall: a tensor of another type or shape, or a plan or rows that lead out of the cache.
        """
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        count, stride = checks.rows_of("projected", projected, width)
        require(count <= 1 or stride == width, f"projected rows are {stride} numbers apart, not {width}")
        require(self.head_dim <= MAX_HEAD_DIM, f"heads of {self.head_dim} numbers are not written on the way")
        require((angles is None) == (self.half == 0), "angles are given where heads are rotated, and only there")
        check("rows", rows, torch.int64, plan.num_tokens * self.num_kv_heads)
        for angle in angles or ():
            check("angles", angle, torch.float32, count, 1, self.half)
        out = self._result(count, plan.num_tokens)
        self._call(projected, width, caches, plan, rows, angles, out)
        return out

    def _result(self, rows: int, tokens: int) -> Tensor:
        """[rows, heads * head_dim], of which the tokens are to be written."""
        require(tokens <= rows, f"the plan has {tokens} tokens, there are {rows}")
        out = guard.empty("out", rows, self.num_heads * self.head_dim)
        if rows > tokens:
            out[tokens:] = 0
        return out

    def _call(
        self,
        query: Tensor,
        stride: int,
        caches: Pair,
        plan: AttentionPlan,
        rows: Tensor | None,
        angles: Pair | None,
        out: Tensor,
    ) -> None:
        if self._caches is None or self._caches[0]() is not caches[0] or self._caches[1]() is not caches[1]:
            check_caches(caches, self.num_kv_heads, self.head_dim)
            self._caches = weakref.ref(caches[0]), weakref.ref(caches[1])
        blocks, _, block_size, _ = caches[0].shape
        cosines, sines = (None, None) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
        self._function(
            self.pointer,
            cpp_plan(plan, self.num_heads // self.num_kv_heads).pointer,
            query.data_ptr(),
            stride,
            plan.num_tokens,
            caches[0].data_ptr(),
            caches[1].data_ptr(),
            CELLS[caches[0].dtype],
            blocks,
            block_size,
            None if rows is None else rows.data_ptr(),
            cosines,
            sines,
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )


def check_caches(caches: Pair, num_kv_heads: int, head_dim: int) -> None:
    """
    Raises:
        RefusedCall: they are no keys and values of such heads, of a type in `CELLS`.
    """
    keys, values = caches
    require(keys.dtype in CELLS, f"a cache of {keys.dtype}")
    width = kv_quant.row_width(head_dim, keys.dtype)
    for cache in (keys, values):
        check("cache", cache, keys.dtype, keys.shape[0], num_kv_heads, keys.shape[2], width)


class CppPlan:
    """A step's plan in the form of compiled code: `struct Plan`."""

    __slots__ = ("_held", "pointer")

    def __init__(self, plan: AttentionPlan, group: int) -> None:
        jobs, tables = plan.jobs(group), plan.block_tables
        check("block tables", tables, torch.int32, *tables.shape)
        trees = None if plan.tree is None else plan.tree_jobs(jobs)
        numbers = np.array(
            [tables.data_ptr(), *tables.shape, jobs.ctypes.data, jobs.shape[0], plan.block_size, plan.window,
             plan.alone, 0 if trees is None else trees.ctypes.data],
            dtype=np.int64,
        )  # fmt: skip
        self._held, self.pointer = (jobs, tables, trees, numbers), numbers.ctypes.data


def cpp_plan(plan: AttentionPlan, group: int) -> CppPlan:
    """Made once per step, for all layers."""
    found = plan.cpp_plans.get(group)
    if found is None:
        found = plan.cpp_plans[group] = CppPlan(plan, group)
    assert isinstance(found, CppPlan)
    return found


def supports(query: Tensor, cache: Tensor) -> bool:
    """True if the compiled path takes these heads: float32 on a CPU, head_dim a multiple of 16 up to 1,024."""
    size = query.shape[-1]
    return (
        query.device.type == "cpu"
        and query.dtype == torch.float32
        and cache.dtype in CELLS
        and size % LANES == 0
        and size <= MAX_LATENT
    )


def takes_compiled(plan: object) -> TypeGuard[AttentionPlan]:
    """True if a plan is for this path."""
    return isinstance(plan, AttentionPlan) and plan.compiled


def cpp_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    *,
    softcap: float,
    sinks: Tensor | None,
    rotation: Rotation,
) -> CppAttention | None:
    """The compiled attention of a float32 layer on a CPU, with norm and rotation as in `rotation`; None if
    unavailable."""
    function = load()
    if function is None or head_dim % LANES or head_dim > MAX_HEAD_DIM or rotation.rotary_dim > head_dim:
        return None
    return CppAttention(
        function, num_heads, num_kv_heads, head_dim, scale, softcap=softcap, sinks=sinks, rotation=rotation
    )


@functools.cache
def load() -> cpp.Function | None:
    """The compiled function, or None where it is not there or does not equal the reference."""
    library = cpp.load()
    if library is None:
        return None
    function = library.function("paged_attention", "pppii" + "ppiii" + "ppp" + "pii")
    right = _agrees(function) and all(_keeps(function, kind) for kind in CELLS) and _takes_latent(function)
    return cpp.checked(function, right, "attention")


def _keeps(function: cpp.Function, kind: torch.dtype) -> bool:
    """True if keys and values of a cache of this type are written exactly, and attended to correctly."""
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(30, generator=generator).view(3, 10).to(torch.int32)
    starts, counts, size = np.array([19, 6, 20]), np.array([1, 2, 40]), 32
    before = torch.randn(2, 30, 2, 7, size, generator=generator, dtype=torch.float32)
    before *= torch.tensor([0.01, 9.0], dtype=torch.float32)[:, None, None, None, None]
    found = [kv_quant.encode(cache, kind) for cache in before]
    expected = [cache.clone() for cache in found]
    plan = AttentionPlan(tables.numpy(), starts, counts, block_size=7, num_kv_heads=2)
    items = AttentionPlan(tables.numpy(), starts, counts, block_size=7, num_kv_heads=2, by_token=True).items
    blocks = tables[items[:, 1].long(), ((items[:, 3] - 1) // 7).long()]
    rows = kv_rows((blocks * 7 + (items[:, 3] - 1) % 7).long(), 2, 7)
    projected = torch.randn(int(counts.sum()), 10 * size, generator=generator, dtype=torch.float32)
    query, key, value = projected.view(-1, 10, size).split((6, 2, 2), dim=1)  # type: ignore[no-untyped-call]
    kv_write(key, value, expected[0], expected[1], rows)
    wanted = paged_attention_reference(query, expected[0], expected[1], tables, items, scale=0.2)
    layer = CppAttention(function, 6, 2, size, 0.2)
    out = layer.write_and_attend(projected, (found[0], found[1]), plan, rows, None)
    pairs = [(kv_quant.as_bytes(got), kv_quant.as_bytes(cache)) for got, cache in zip(found, expected, strict=True)]
    error = (out.view(wanted.shape) - wanted).abs()
    allowed = 1e-4 if kind == torch.float32 else float(wanted.abs().max()) * ROUNDED  # of the block, the last 40 tokens
    near = bool((error[:-40] < 1e-4).all() and (error[-40:] < allowed).all())
    return near and all(torch.equal(*pair) for pair in pairs)


def _takes_latent(function: cpp.Function) -> bool:
    """Heads that are wider than those of `_agrees`, which are not written on the way."""
    generator = torch.Generator().manual_seed(2)
    tables, starts, counts = np.arange(12, dtype=np.int32)[::-1].reshape(2, 6), np.array([30, 9]), np.array([1, 20])
    cache = torch.randn(12, 1, 7, MAX_HEAD_DIM + LANES, generator=generator, dtype=torch.float32)
    query = torch.randn(21, 3, cache.shape[-1], generator=generator, dtype=torch.float32)
    plan, single = (
        AttentionPlan(tables, starts, counts, block_size=7, num_kv_heads=1, by_token=by_token)
        for by_token in (False, True)
    )
    out = CppAttention(function, 3, 1, cache.shape[-1], 0.05).attend(query, (cache, cache), plan)
    expected = paged_attention_reference(query, cache, cache, plan.block_tables, single.items, scale=0.05)
    return torch.allclose(out, expected, atol=1e-4)


def _agrees(function: cpp.Function) -> bool:
    """Compare with the reference: a row of one token, of two and of many, and a batch of single tokens; all
    operations."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(30, generator=generator).view(3, 10).to(torch.int32)
    sinks = torch.randn(6, generator=generator, dtype=torch.float32)
    norms = tuple(torch.rand(2, 32, generator=generator, dtype=torch.float32))
    every = (
        (np.array([19, 6, 20]), np.array([1, 2, 40]), None, 0.0, None),
        (np.array([19, 6, 20]), np.array([1, 2, 40]), 11, 0.7, sinks),
        (np.array([19, 6, 60]), np.array([1, 1, 1]), None, 0.0, None),
    )
    for starts, counts, window, softcap, given in every:
        tokens = int(counts.sum())
        caches = torch.randn(2, 30, 2, 7, 32, generator=generator, dtype=torch.float32)
        projected = torch.randn(tokens, 10 * 32, generator=generator, dtype=torch.float32)
        angles = torch.rand(2, tokens, 1, 12, generator=generator, dtype=torch.float32)
        plan, single = (
            AttentionPlan(
                tables.numpy(), starts, counts, block_size=7, num_kv_heads=2, window=window, by_token=by_token
            )
            for by_token in (False, True)
        )
        items = single.items
        positions = items[:, 3] - 1
        blocks = tables[items[:, 1].long(), (positions // 7).long()]
        rows = kv_rows((blocks * 7 + positions % 7).long(), 2, 7)
        query, key, value = projected.view(tokens, 10, 32).split((6, 2, 2), dim=1)  # type: ignore[no-untyped-call]
        query, key = (
            rope_reference(functional.rms_norm(part, (32,), norm, 1e-5), angles[0], angles[1])
            for part, norm in zip((query, key), norms, strict=True)
        )
        written = caches.clone()
        kv_write_reference(key, value, written[0], written[1], rows)
        expected = paged_attention_reference(
            query, written[0], written[1], tables, items, scale=0.2, softcap=softcap, sinks=given
        )
        layer = CppAttention(
            function, 6, 2, 32, 0.2, softcap=softcap, sinks=given, rotation=Rotation((norms[0], norms[1]), 1e-5, 24)
        )
        for some in (plan, single):
            found, pair = caches.clone(), projected.clone()
            out = layer.write_and_attend(pair, (found[0], found[1]), some, rows, (angles[0], angles[1]))
            same = torch.allclose(out.view(expected.shape), expected, atol=1e-4)
            if not same or not torch.allclose(found, written, atol=1e-5):
                return False
    return True
