"""The attention plan of a step for kernels on a GPU: tensors only, divided among programs on the device.

Nothing here waits for the device or reads from it, and `refresh` only launches kernels. So a plan over static tensors
can be part of a CUDA graph, whose replays read the tensors' current content.
"""

import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.common.triton import Launch, multiprocessors, next_power_of_2
from troupellm.kernels.paged_attention.tree import NO_TREE, TreeMask

Ints = NDArray[np.int64]

MOST_PACKED = 64
"""Rows of a product of the decode kernel (query tokens times heads of a group), beyond which rows are prefilled."""
LATENT_HEADS = 32
"""Heads that read a tile of latent vectors together: as many as their sums leave registers for."""
SMALLEST_PRODUCT = 16
"""Rows of a product that tensor cores take."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The properties of attention that are the same in every step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    """Keys that a token sees, itself included; None is all before it."""
    kv_dtype: torch.dtype = torch.bfloat16
    """Type of the cache."""
    latent: int = 0
    """For a cache of latent vectors (MLA), which is one KV head: size of the latent vector within a row; 0 is none."""

    @property
    def group(self) -> int:
        """Query heads per KV head; of heads that read latent vectors, as many as fit into one product."""
        return min(self.num_heads, LATENT_HEADS) if self.latent else self.num_heads // self.num_kv_heads

    @property
    def task_heads(self) -> int:
        """The number of times a row's tiles are read: once per KV head, or per block of heads."""
        return -(-self.num_heads // self.group) if self.latent else self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """head_dim as a tile's side."""
        return max(next_power_of_2(self.head_dim), SMALLEST_PRODUCT)

    def packed(self, queries: int) -> int:
        """Rows of a product of the decode kernel, padded."""
        return max(next_power_of_2(queries * self.group), SMALLEST_PRODUCT)


def decode_launch(shape: AttentionShape, queries: int) -> Launch:
    """Sizes that compile without spills and with two tiles in flight (see tests/kernels/triton/checks)."""
    if shape.latent:
        stages = 3 if shape.kv_dtype.itemsize == 2 else 2
        return Launch(warps=8, stages=stages, constants={"TILE": 32 if shape.kv_dtype.itemsize <= 2 else 16})
    constants = {"TILE": _tile(shape)}
    if shape.packed(queries) > 32:
        return Launch(warps=8, stages=4, constants=constants, occupancy=1)
    warps, stages = (8 if shape.padded_dim > 128 else 4), (5 if shape.kv_dtype == torch.int8 else 3)
    return Launch(warps=warps, stages=stages, constants=constants, occupancy=2)


def extend_launch(shape: AttentionShape) -> Launch:
    """Chosen like that of decode; ROWS are query tokens times heads of a group."""
    narrow, single = shape.padded_dim <= 128, shape.kv_dtype == torch.float32
    rows = max(32 if single or shape.padded_dim > 256 else 128 if narrow else 64, next_power_of_2(shape.group))
    constants = {"ROWS": rows, "TILE": _tile(shape)}
    return Launch(warps=8, stages=3 if narrow and not single else 2, constants=constants)


def _tile(shape: AttentionShape) -> int:
    """Keys of a tile: 16 KiB of them in 16 bits; fewer where scales between the rows cost registers."""
    row_bytes = shape.padded_dim * max(shape.kv_dtype.itemsize, 2)
    tile = min(64, max(SMALLEST_PRODUCT, 16384 // row_bytes))
    return max(tile // 2, SMALLEST_PRODUCT) if shape.kv_dtype == torch.int8 else tile


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows with the same small number of query tokens."""

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    queries: int
    launch: Launch
    tasks: Tensor
    """int32 [programs + 1, 4], see `triton_plan.map_decode`."""


@dataclass(frozen=True, slots=True)
class ExtendPart:
    """Rows with any number of query tokens."""

    block_tables: Tensor
    query_starts: Tensor
    query_stops: Tensor
    context_lens: Tensor
    launch: Launch
    tokens: int
    """Query tokens of one row, in one program."""
    blocks: Tensor
    """int32 [programs, 2], see `triton_plan.map_extend`."""
    tree: tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]
    """The `DeviceTree` of these rows and all tokens; None if no row has a tree."""


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """`TreeMask` on the device."""

    bases: Tensor
    """int32 [rows], in the order of the plan's rows."""
    nodes: Tensor
    """int64 [tokens]: `seen`."""
    positions: Tensor
    """int32 [tokens]."""


@dataclass(frozen=True, slots=True)
class LongRow:
    """A row of latent vectors whose keys and values are worth making, for it has many query tokens."""

    tokens: slice
    """Place in the flat batch."""
    blocks: Tensor
    """int64 [blocks]."""
    keys: int
    """Number of the row's keys in the blocks; the last ones belong to the tokens of this step."""


class DevicePlan:
    """Query tokens and their keys on a device.

    Attributes:
        shape: of the layers that read the plan.
        num_tokens: query tokens of all rows.
        decode, extend: the rows, by the kernel that computes them.
        long: rows of the flat batch beside those of the plan.
        others: int32 [num_tokens], where the plan's tokens lie in the flat batch; None is in this order, without gaps.
    """

    def __init__(
        self, block_tables: Tensor, query_starts: Tensor, query_stops: Tensor, context_lens: Tensor, *,
        shape: AttentionShape, num_tokens: int, decode_rows: int, queries: int = 1,
        decode: Launch | None = None, extend: Launch | None = None, programs: int | None = None,
        tree: DeviceTree | None = None, long: tuple[LongRow, ...] = (), others: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Plan over tensors that may be written to again, after which `refresh` is due.

        Args:
            block_tables: int32 [rows, width] block ids; entries behind a row's keys are never read.
            query_starts: int32 [rows], each row's first token in the flat batch.
            query_stops: int32 [rows], its token past the last; of [rows + 1] cumulated counts, both are views.
            context_lens: int32 [rows], keys of a row, those of this step included; 0 is a row that pads.
            num_tokens: of the flat batch; no row ends behind it.
            decode_rows: how many rows, the first ones, have exactly `queries` tokens.
            decode, extend: tile sizes other than those from the tables.
            programs: of the decode kernel's grid, if not as many as the device holds.
            tree: of rows behind the first `decode_rows`; not for latent vectors.
            long, others: as the attributes; for latent vectors only.
        """
        if tree is not None and shape.latent:
            raise ValueError("a tree does not go with latent vectors")
        self.shape, self.num_tokens, self.long, self.others = shape, num_tokens, long, others
        self.decode: DecodePart | None = None
        self.extend: ExtendPart | None = None
        device, rows = block_tables.device, block_tables.shape[0]
        if decode_rows:
            launch = decode or decode_launch(shape, queries)
            count = programs or multiprocessors(device) * launch.occupancy
            self.decode = DecodePart(
                block_tables=block_tables[:decode_rows],
                query_starts=query_starts[:decode_rows],
                context_lens=context_lens[:decode_rows],
                queries=queries,
                launch=launch,
                tasks=torch.empty(count + 1, 4, dtype=torch.int32, device=device),
            )
        if rows > decode_rows:
            launch = extend or extend_launch(shape)
            tokens = launch.constants["ROWS"] // shape.group
            most = (num_tokens - decode_rows * queries) // tokens + rows - decode_rows
            self.extend = ExtendPart(
                block_tables=block_tables[decode_rows:],
                query_starts=query_starts[decode_rows:],
                query_stops=query_stops[decode_rows:],
                context_lens=context_lens[decode_rows:],
                launch=launch,
                tokens=tokens,
                blocks=torch.empty(most, 2, dtype=torch.int32, device=device),
                tree=(None, None, None) if tree is None else (tree.bases[decode_rows:], tree.nodes, tree.positions),
            )
        self.refresh()

    @classmethod
    def from_host(
        cls, block_tables: NDArray[np.int32], starts: Ints, counts: Ints, *, shape: AttentionShape,
        device: torch.device, invariant: bool = False, decode: Launch | None = None, extend: Launch | None = None,
        programs: int | None = None, tree: TreeMask | None = None,
    ) -> "DevicePlan":  # fmt: skip
        """Plan one step from the host's numbers, as `AttentionPlan` does: two copies to the device, no wait.

        Args:
            block_tables: [rows, width].
            starts: [rows] position of each row's first query token.
            counts: [rows] query tokens of each row; they follow each other in the flat batch.
            invariant: every token's sums are taken in an order that depends on its row alone, and not on how the
                row's tokens are shared out to steps: one kernel for all rows, whose tiles are never cut.
            tree: as of `AttentionPlan`.

        Raises:
            NotImplementedError: a tree of drafts over latent vectors.
        """
        if tree is not None and shape.latent:
            raise NotImplementedError("the attention kernels for a GPU compute no trees of drafts over latent vectors")
        if shape.latent:  # every token is a row: queries are as wide as many heads, so few of them fit into a product
            owner = np.repeat(np.arange(counts.size), counts)
            begins = np.repeat(np.cumsum(counts) - counts, counts)
            starts = np.repeat(starts, counts) + np.arange(owner.size) - begins
            block_tables, counts = block_tables[owner], np.ones_like(owner)
        uniform = (
            tree is None
            and counts.size > 0
            and bool((counts == counts[0]).all())
            and shape.packed(int(counts[0])) <= MOST_PACKED
        )
        queries = int(counts[0]) if uniform else 1
        few = (counts == queries) & (not invariant)
        if tree is not None:
            few &= tree.bases == NO_TREE
        order = np.argsort(~few, kind="stable")
        stops = np.cumsum(counts)
        spans = np.stack((stops - counts, stops, starts + counts))[:, order].astype(np.int32)
        tables, columns = _upload(block_tables[order], device), _upload(spans, device)
        return cls(
            tables, columns[0], columns[1], columns[2], shape=shape, num_tokens=int(stops[-1]) if stops.size else 0,
            decode_rows=int(few.sum()), queries=queries, decode=decode, extend=extend, programs=programs,
            tree=None if tree is None else DeviceTree(
                _upload(tree.bases[order].astype(np.int32), device), _upload(tree.seen.view(np.int64), device),
                _upload(tree.positions.astype(np.int32), device),
            ),
        )  # fmt: skip

    def refresh(self) -> None:
        """Share out the work that the tensors describe now."""
        from troupellm.kernels.paged_attention import triton_plan

        if self.decode is not None:
            triton_plan.map_decode(
                self.decode.context_lens,
                self.decode.tasks,
                kv_heads=self.shape.task_heads,
                queries=self.decode.queries,
                window=self.shape.window or 0,
                tile=self.decode.launch.constants["TILE"],
            )
        if self.extend is not None:
            part = self.extend
            triton_plan.map_extend(part.query_starts, part.query_stops, part.blocks, block=part.tokens)


def _upload(values: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class _Workspaces(threading.local):
    """The work space of one thread."""

    def __init__(self) -> None:
        self.known: dict[tuple[torch.device, int, int, int], tuple[Tensor, Tensor]] = {}


_workspaces = _Workspaces()


def workspace(device: torch.device, programs: int, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Where cut rows leave their sums [2 * programs, rows, dim] and statistics [2 * programs, 2, rows].

    Kept for as long as the thread, since graphs write there, and shared by all layers, which write and read it one
    after the other. Another engine's thread launches its kernels between these, and has its own.
    """
    known, key = _workspaces.known, (device, programs, rows, dim)
    if key not in known:
        sums = torch.empty(2 * programs, rows, dim, dtype=torch.float32, device=device)
        known[key] = sums, torch.empty(2 * programs, 2, rows, dtype=torch.float32, device=device)
    return known[key]
