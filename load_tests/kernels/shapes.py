"""Every operation at a model's real shapes: what to run, and the bytes and operations that it cannot do without."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.kernels.fused_moe import Routing, fused_moe, pack_experts, route
from troupellm.kernels.gated_act import gelu_mul, silu_mul
from troupellm.kernels.kv_quant import encode, row_width
from troupellm.kernels.linear import PackedLinear, linear, pack
from troupellm.kernels.paged_attention import paged_attention
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.quantized_linear import Fp8, Int8Channel
from troupellm.kernels.rms_norm import add_rms_norm, rms_norm
from troupellm.kernels.rope_kv_write.kv_write import kv_rows, kv_write
from troupellm.kernels.rope_kv_write.rope import rope
from troupellm.kernels.sampling import draw
from troupellm.kernels.sampling.noise import position_keys, stream_key, token_codes
from troupellm.load_tests.roofline import ModelSize

COLD_BYTES = 256 * 2**20
"""Buffers take turns until so much was touched, so that none is found in a cache."""
MOST_COPIES = 64
BLOCK_SIZE = 16


class Work:
    """One operation at one shape.

    Attributes:
        run: computes with the buffers of a number.
        bytes: that must be read and written.
        flops: operations, in `kind`.
    """

    def __init__(self, name: str, run: Callable[[int], Tensor], *, size: float, flops: float, kind: str) -> None:
        self.name, self.run, self.bytes, self.flops, self.kind = name, run, size, flops, kind


class Shapes:
    """Makes the works of a model on a device."""

    def __init__(self, size: ModelSize, device: torch.device, dtype: torch.dtype, context: int) -> None:
        self.size, self.device, self.dtype, self.context = size, device, dtype, context
        self.width, self.kind = dtype.itemsize, str(dtype).removeprefix("torch.")

    def works(self, operation: str, batch: int) -> Iterator[Work]:
        makers: dict[str, Callable[[int], Iterator[Work]]] = {
            "linear": self._linear,
            "linear_invariant": partial(self._linear, invariant=True),
            "linear_int8": lambda rows: self._eight_bits(rows, Int8Channel, "int8"),
            "rms_norm": self._rms_norm,
            "add_rms_norm": self._add_rms_norm,
            "rope": self._rope,
            "silu_mul": lambda rows: self.rowwise("silu*up", silu_mul, rows, 2 * self.size.intermediate, 1.5),
            "gelu_mul": lambda rows: self.rowwise("gelu*up", gelu_mul, rows, 2 * self.size.intermediate, 1.5),
            "kv_write": self._kv_write,
            "decode_attention": self.decode_attention,
            "prefill_attention": self._prefill_attention,
            "sampling": self._sampling,
            "fused_moe": self._fused_moe,
            "linear_fp8": lambda rows: self._eight_bits(rows, Fp8, "fp8"),
        }
        if operation in makers:
            return makers[operation](batch)
        from troupellm.load_tests.kernels.more_shapes import works  # which are made of what is here

        return works(self, operation, batch)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).mul_(0.1).to(self.dtype)

    def copies(self, size: float) -> int:
        return int(min(MOST_COPIES, max(1, -(-COLD_BYTES // size))))

    def matrices(self) -> dict[str, tuple[int, int]]:
        size = self.size
        queries, keys = size.heads * size.head_dim, 2 * size.kv_heads * size.head_dim
        inner = size.expert_intermediate or size.intermediate
        return {
            "qkv": (queries + keys, size.hidden),
            "o": (size.hidden, queries),
            "gate_up": (2 * inner, size.hidden),
            "down": (size.hidden, inner),
            "head": (size.vocab, size.hidden),
        }

    def _linear(self, batch: int, *, invariant: bool = False) -> Iterator[Work]:
        """invariant: rows do not depend on each other, to the bit."""
        for name, (rows, columns) in self.matrices().items():
            size = rows * columns * self.width
            with batch_invariant(invariant):
                packed = [pack(self.random(rows, columns)) for _ in range(self.copies(size))]
            yield self.product(f"{name} {batch}x{columns}x{rows}", packed, batch, size, self.kind)

    def _eight_bits(self, batch: int, kind: type[Int8Channel | Fp8], rate: str) -> Iterator[Work]:
        """rate: the ceiling of products that counts."""
        for name, (rows, columns) in self.matrices().items():
            size = rows * columns + 4 * rows
            weights = [kind.quantize(self.random(rows, columns)) for _ in range(self.copies(size))]
            packed = [pack(weight) for weight in weights]
            yield self.product(f"{name} {batch}x{columns}x{rows}", packed, batch, size, rate)

    def product(self, name: str, packed: list[PackedLinear], batch: int, size: int, kind: str) -> Work:
        rows, columns = packed[0].out_features, packed[0].in_features
        x = self.random(batch, columns)
        traffic = size + batch * (rows + columns) * self.width
        flops = 2 * batch * rows * columns
        return Work(name, lambda number: linear(x, packed[number % len(packed)]), size=traffic, flops=flops, kind=kind)

    def rowwise(
        self, name: str, run: Callable[[Tensor], Tensor], batch: int, columns: int, moved: float
    ) -> Iterator[Work]:
        """moved: how many times its input's size it reads and writes."""
        size = batch * columns * self.width
        inputs = [self.random(batch, columns) for _ in range(self.copies(size))]
        yield Work(
            f"{name} {batch}x{columns}",
            lambda number: run(inputs[number % len(inputs)]),
            size=size * moved,
            flops=0.0,
            kind=self.kind,
        )

    def _rms_norm(self, batch: int) -> Iterator[Work]:
        weight = self.random(self.size.hidden)
        return self.rowwise("norm", lambda x: rms_norm(x, weight, 1e-6), batch, self.size.hidden, 2)

    def _add_rms_norm(self, batch: int) -> Iterator[Work]:
        weight, residual = self.random(self.size.hidden), self.random(batch, self.size.hidden)
        return self.rowwise("add+norm", lambda x: add_rms_norm(x, residual, weight, 1e-6), batch, self.size.hidden, 4)

    def _rope(self, batch: int) -> Iterator[Work]:
        size = self.size
        angles = torch.rand(batch, 1, size.head_dim // 2, device=self.device) * 6.28
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        heads = size.heads + size.kv_heads
        return self.rowwise(
            "rope", lambda x: rope(x.view(batch, heads, size.head_dim), cos, sin), batch, heads * size.head_dim, 2
        )

    def caches(self, blocks: int, codes: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """codes: what keys and values are stored as, the model's type by default."""
        shape = (blocks, self.size.kv_heads, BLOCK_SIZE, self.size.head_dim)
        return encode(self.random(*shape), codes or self.dtype), encode(self.random(*shape), codes or self.dtype)

    def _kv_write(self, batch: int) -> Iterator[Work]:
        size = self.size
        caches = self.caches(4 * batch + 4)
        slots = torch.randperm(caches[0].shape[0] * BLOCK_SIZE)[:batch].to(self.device)
        rows = kv_rows(slots, size.kv_heads, BLOCK_SIZE)
        key, value = (self.random(batch, size.kv_heads, size.head_dim) for _ in range(2))

        def run(_: int) -> Tensor:
            kv_write(key, value, *caches, rows)
            return caches[0]

        moved = 4 * batch * size.kv_heads * size.head_dim * self.width
        yield Work(f"kv write {batch}", run, size=moved, flops=0.0, kind=self.kind)

    def decode_attention(self, batch: int) -> Iterator[Work]:
        return self.attention(f"decode {batch} rows, {self.context} keys", [self.context - 1] * batch, [1] * batch)

    def _prefill_attention(self, batch: int) -> Iterator[Work]:
        """One prompt, independent of the batch."""
        if batch == 1:
            yield from self.attention(f"prompt of {self.context}", [0], [self.context])

    def attention(
        self, name: str, starts: list[int], counts: list[int], codes: torch.dtype | None = None
    ) -> Iterator[Work]:
        """Rows that compute `counts` tokens behind `starts` others; codes as in `caches`."""
        size, lengths = self.size, [start + count for start, count in zip(starts, counts, strict=True)]
        width = -(-max(lengths) // BLOCK_SIZE)
        needed = [-(-length // BLOCK_SIZE) for length in lengths]
        stored = codes or self.dtype
        kv_bytes = 2 * sum(lengths) * size.kv_heads * row_width(size.head_dim, stored) * stored.itemsize
        caches = [self.caches(sum(needed), codes) for _ in range(max(2, min(4, self.copies(kv_bytes))))]
        order = np.random.default_rng(0).permutation(sum(needed)).astype(np.int32)
        tables = np.full((len(lengths), width), -1, dtype=np.int32)
        for row, (count, end) in enumerate(zip(needed, np.cumsum(needed).tolist(), strict=True)):
            tables[row, :count] = order[end - count : end]
        query = self.random(sum(counts), size.heads, size.head_dim)
        run = self._attend(query, caches, tables, np.asarray(starts), np.asarray(counts))
        pairs = sum(count * (start + (count + 1) / 2) for start, count in zip(starts, counts, strict=True))
        traffic = kv_bytes + 2 * query.numel() * self.width
        yield Work(name, run, size=traffic, flops=4 * size.heads * size.head_dim * pairs, kind=self.kind)

    def _attend(
        self,
        query: Tensor,
        caches: list[tuple[Tensor, Tensor]],
        tables: NDArray[np.int32],
        starts: NDArray[Any],
        counts: NDArray[Any],
    ) -> Callable[[int], Tensor]:
        size, scale = self.size, self.size.head_dim**-0.5
        if self.device.type == "cpu":
            plan = AttentionPlan(tables, starts, counts, block_size=BLOCK_SIZE, num_kv_heads=size.kv_heads)
            return lambda number: paged_attention(query, *caches[number % len(caches)], plan, scale)
        from troupellm.kernels.paged_attention import triton_launch
        from troupellm.kernels.paged_attention.device_plan import AttentionShape, DevicePlan

        shape = AttentionShape(size.heads, size.kv_heads, size.head_dim, BLOCK_SIZE, None, caches[0][0].dtype)
        there = DevicePlan.from_host(tables, starts, counts, shape=shape, device=self.device)
        out = torch.empty_like(query)

        def run(number: int) -> Tensor:
            triton_launch.run(query, caches[number % len(caches)], there, scale, out)
            return out

        return run

    def _sampling(self, batch: int) -> Iterator[Work]:
        """Plain draws: no list is sorted, and the noise is made on the way."""
        size = 4 * batch * self.size.vocab
        logits = [torch.randn(batch, self.size.vocab, device=self.device) for _ in range(min(8, self.copies(size)))]
        keys = position_keys(torch.full((batch,), stream_key(1, 0)), torch.arange(batch)).to(self.device)
        codes = token_codes(self.size.vocab, self.device)
        yield Work(
            f"draw {batch}x{self.size.vocab}",
            lambda number: draw(logits[number % len(logits)], keys, codes),
            size=size,
            flops=0.0,
            kind="float32",
        )

    def _fused_moe(self, batch: int) -> Iterator[Work]:
        """One layer's experts, for models that have them; uniform routing."""
        size = self.size
        if not size.experts:
            return
        inner = size.expert_intermediate
        gate_up = [self.random(2 * inner, size.hidden) for _ in range(size.experts)]
        experts = pack_experts(gate_up, [self.random(size.hidden, inner) for _ in range(size.experts)])
        x, logits = self.random(batch, size.hidden), self.random(batch, size.experts)
        weights, ids = route(logits, Routing(top_k=size.active_experts, renormalize=True))
        used, one = len(set(ids.flatten().tolist())), 3 * inner * size.hidden
        yield Work(
            f"experts {batch} rows, {used} used",
            lambda _: fused_moe(x, weights, ids, experts),
            size=used * one * self.width,
            flops=2 * batch * size.active_experts * one,
            kind=self.kind,
        )
