"""The tensors of one step, made on the device from slots and positions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.decode_io import begin, gathered
from troupellm.kernels.mla_attention import expanding_tokens
from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.device_plan import MOST_PACKED, AttentionShape, DevicePlan, DeviceTree, LongRow
from troupellm.kernels.rope_kv_write.kv_write import kv_rows as kv_rows_of
from troupellm.models.adapters.batch import AdapterBatch
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.gpu.row_table import DeviceRows
from troupellm.models.layers.cache_layout import View
from troupellm.models.layers.forward_batch import ForwardBatch, GroupBatch


@dataclass(frozen=True, slots=True)
class DeviceSpans:
    """Consecutive positions of some rows, all on the device.

    Attributes:
        starts, stops: int32 [rows], each row's first token in the flat batch, and the one past its last; rows with
            exactly `queries` tokens may come first, in any order within the batch.
        context_lens: int32 [rows], keys of each row with this step; 0 is a row that pads.
        num_tokens: of the flat batch.
        decode_rows: how many rows, the first ones, have `queries` tokens.
    """

    starts: Tensor
    stops: Tensor
    context_lens: Tensor
    num_tokens: int
    decode_rows: int
    queries: int = 1
    trees: Mapping[int | None, DeviceTree] | None = None
    """Trees of rows behind the first `decode_rows`, by window."""
    owners: Tensor | None = None
    """int64 [tokens], the row that each token is of; None where every row has `queries` tokens, in order."""
    known: NDArray[np.int64] | None = None
    """[3, rows]: `starts`, `stops` and `context_lens`, where the host knows them."""


GroupPlanner = Callable[[Tensor, DeviceSpans, View], Plan]
"""Plans the rows' attention from block tables int32 [rows, width], the rows, and the view of the cache."""


def triton_planner(config: DecoderConfig, block_size: int, kv_dtype: torch.dtype, *, invariant: bool) -> GroupPlanner:
    """Plans with our kernels. A kernel makes the plan, so that it can be part of a graph.

    Args:
        invariant: sums are taken in an order that depends on a row alone.
    """

    mla = config.mla
    latent = 0 if mla is None else mla.latent
    least = 0 if mla is None else expanding_tokens(mla.plain, mla.value, mla.latent, mla.rotated)

    def plan(tables: Tensor, spans: DeviceSpans, view: View) -> Plan:
        heads, window = view.heads, view.window
        shape = AttentionShape(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, block_size, window, kv_dtype, latent
        )
        if latent:
            return _by_token(tables, spans, shape, least)
        wide = shape.packed(spans.queries) > MOST_PACKED
        return DevicePlan(
            tables,
            spans.starts,
            spans.stops,
            spans.context_lens,
            shape=shape,
            num_tokens=spans.num_tokens,
            decode_rows=0 if invariant or wide else spans.decode_rows,
            queries=spans.queries,
            tree=None if spans.trees is None else spans.trees[window],
        )

    return plan


def _by_token(tables: Tensor, spans: DeviceSpans, shape: AttentionShape, least: int) -> DevicePlan:
    """Every token is a row, as the kernel for latent vectors wants them, but for those of rows with `least` or more."""
    tokens = torch.arange(spans.num_tokens, dtype=torch.int32, device=tables.device)
    owner = tokens // spans.queries if spans.owners is None else spans.owners
    long, others, places = _long_rows(tables, spans, shape, least), None, tokens
    if long:
        gaps = zip((0, *(row.tokens.stop for row in long)), (*(row.tokens.start for row in long), None), strict=True)
        others = tokens = torch.cat([tokens[begin:end] for begin, end in gaps])
        owner, places = owner[tokens], places[: tokens.shape[0]]
    context_lens = (spans.context_lens[owner] - spans.stops[owner] + tokens + 1).clamp_(min=0)
    count = tokens.shape[0]
    return DevicePlan(
        tables[owner],
        places,
        places + 1,
        context_lens,
        shape=shape,
        num_tokens=count,
        decode_rows=count,
        long=long,
        others=others,
    )


def _long_rows(tables: Tensor, spans: DeviceSpans, shape: AttentionShape, least: int) -> tuple[LongRow, ...]:
    """Long rows in the order of the flat batch."""
    if spans.known is None:
        return ()
    found = enumerate(spans.known.T.tolist())
    rows = sorted((start, stop, keys, row) for row, (start, stop, keys) in found if stop - start >= least)
    return tuple(
        LongRow(slice(start, stop), tables[row, : -(-keys // shape.block_size)].long(), keys)
        for start, stop, keys, row in rows
    )


class BatchMaker:
    """Makes forward batches out of rows' block tables."""

    def __init__(self, cache: KVCache, plan: GroupPlanner) -> None:
        self._plan, self._layout, self._even = plan, cache.layout, cache.layout.even
        kv_heads = cache.layout.views[0].heads.num_kv_heads if self._even else 1
        self._sizes = {"block_size": cache.block_size, "kv_heads": kv_heads}

    def make(
        self,
        spans: DeviceSpans,
        slots: Tensor,
        token_slots: Tensor,
        positions: Tensor,
        rows: DeviceRows,
        logit_tokens: Tensor,
        *,
        text: Tensor | None = None,
        inputs: tuple[Tensor, Tensor] | None = None,
        adapters: AdapterBatch | None = None,
    ) -> ForwardBatch:
        """Of any tokens.

        Args:
            slots: int64 [rows], in the order of the spans.
            token_slots, positions: int64 [tokens].
            text: int64 [tokens], where tokens stand in the text, if that is not where they lie: of trees of drafts.
            logit_tokens, inputs, adapters: as of `ForwardBatch`.
        """
        token_ids, kv_rows = gathered(rows.tokens, rows.block_tables, token_slots, positions, **self._sizes)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions if text is None else text,
            groups=self._groups(spans, rows.block_tables.index_select(1, slots), kv_rows),
            logit_tokens=logit_tokens,
            inputs=inputs,
            adapters=adapters,
        )

    def make_uniform(
        self,
        slots: Tensor,
        ends: Tensor,
        counts: Tensor | None,
        queries: int,
        rows: DeviceRows,
        angle_table: Tensor | None,
    ) -> ForwardBatch:
        """The batch of the last tokens of some rows, all with logits; arguments as of `step_ends.begin`."""
        begun = begin(
            slots,
            ends,
            counts,
            rows.tokens,
            rows.block_tables,
            angle_table,
            queries=queries,
            scratch=rows.scratch,
            **self._sizes,
        )
        spans = DeviceSpans(
            begun.starts[:-1], begun.starts[1:], begun.context_lens, begun.positions.shape[0], slots.shape[0], queries
        )
        return ForwardBatch(
            token_ids=begun.token_ids,
            positions=begun.positions,
            groups=self._groups(spans, begun.tables, begun.kv_rows),
            logit_tokens=None,
            angles=begun.angles,
        )

    def _groups(self, spans: DeviceSpans, tables: Tensor, kv_rows: Tensor) -> tuple[GroupBatch, ...]:
        """tables: int32 [groups, rows, width]; kv_rows: int64 [groups, tokens * kv_heads]."""
        if not self._even:
            return self._uneven_groups(spans, tables, kv_rows)
        return tuple(
            GroupBatch(kv_rows[view.group], self._plan(tables[view.group], spans, view)) for view in self._layout.views
        )

    def _uneven_groups(self, spans: DeviceSpans, tables: Tensor, places: Tensor) -> tuple[GroupBatch, ...]:
        """As `_groups`, of layers with different heads. places: int64 [groups, tokens], within one head's cache."""
        size, found = self._sizes["block_size"], []
        rows: dict[tuple[int, int, int], Tensor] = {}
        for view in self._layout.views:
            form = view.group, view.stride, view.heads.num_kv_heads
            table, lying = tables[view.group], places[view.group]
            if view.stride > 1:
                table, lying = table * view.stride, lying + (lying // size) * (size * (view.stride - 1))
            if form not in rows:
                rows[form] = kv_rows_of(lying, view.heads.num_kv_heads, size)
            found.append(GroupBatch(rows[form], self._plan(table, spans, view)))
        return tuple(found)
