"""The tensors of one step, made on the device from slots and positions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from troupellm.kernels.paged_attention import Plan
from troupellm.kernels.paged_attention.device_plan import MOST_PACKED, AttentionShape, DevicePlan, DeviceTree
from troupellm.models.cache_layout import CacheLayout
from troupellm.models.decoder_config import DecoderConfig
from troupellm.models.forward_batch import ForwardBatch, GroupBatch
from troupellm.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class DeviceSpans:
    """Consecutive positions of some rows, all on the device.

    Attributes:
        slots: int64 [rows]; rows with exactly `queries` tokens may come first, whatever their order in the batch.
        starts, stops: int32 [rows], each row's first token in the flat batch, and the one past its last.
        context_lens: int32 [rows], keys of each row with this step; 0 is a row that pads.
        token_slots, positions: int64 [tokens].
        decode_rows: how many rows, the first ones, have `queries` tokens.
    """

    slots: Tensor
    starts: Tensor
    stops: Tensor
    context_lens: Tensor
    token_slots: Tensor
    positions: Tensor
    decode_rows: int
    queries: int = 1
    text: Tensor | None = None
    """int64 [tokens], where tokens stand in the text, if that is not where they lie: of trees of drafts."""
    trees: Mapping[int | None, DeviceTree] | None = None
    """Of rows behind the first `decode_rows`, by how many keys a token sees."""


GroupPlanner = Callable[[Tensor, DeviceSpans, int | None], Plan]
"""What the rows attend to, from block tables int32 [rows, width], the rows, and how many keys a token sees."""


def triton_planner(config: DecoderConfig, block_size: int, kv_dtype: torch.dtype, *, invariant: bool) -> GroupPlanner:
    """Of our kernels, whose plan is made by a kernel, too, so that it can be part of a graph.

    Args:
        invariant: sums are taken in an order that depends on a row alone.
    """

    latent = 0 if config.mla is None else config.mla.latent

    def plan(tables: Tensor, spans: DeviceSpans, window: int | None) -> Plan:
        shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, block_size, window, kv_dtype, latent
        )  # fmt: skip
        if latent:
            return _by_token(tables, spans, shape)
        wide = shape.packed(spans.queries) > MOST_PACKED
        return DevicePlan(
            tables, spans.starts, spans.stops, spans.context_lens, shape=shape, num_tokens=spans.positions.shape[0],
            decode_rows=0 if invariant or wide else spans.decode_rows, queries=spans.queries,
            tree=None if spans.trees is None else spans.trees[window],
        )  # fmt: skip

    return plan


def _by_token(tables: Tensor, spans: DeviceSpans, shape: AttentionShape) -> DevicePlan:
    """Every token is a row, as the kernel for latent vectors wants them."""
    count = spans.positions.shape[0]
    tokens = torch.arange(count, dtype=torch.int32, device=tables.device)
    order = torch.argsort(spans.starts)
    owner = order[torch.searchsorted(spans.starts[order], tokens, right=True) - 1]
    context_lens = (spans.context_lens[owner] - spans.stops[owner] + tokens + 1).clamp_(min=0)
    return DevicePlan(
        tables[owner], tokens, tokens + 1, context_lens, shape=shape, num_tokens=count, decode_rows=count
    )  # fmt: skip


class BatchMaker:
    """Makes forward batches out of rows' block tables."""

    def __init__(self, cache: KVCache, plan: GroupPlanner) -> None:
        self._plan, self._block_size, self._num_kv_heads = plan, cache.block_size, cache.num_kv_heads
        self._layout: CacheLayout = cache.layout
        self._heads = torch.arange(cache.num_kv_heads, device=cache.storage.device)

    def make(
        self, spans: DeviceSpans, tokens: Tensor, block_tables: Tensor, logit_tokens: Tensor,
        inputs: tuple[Tensor, Tensor] | None = None,
    ) -> ForwardBatch:  # fmt: skip
        """
        Args:
            tokens: int32 [slots, length], what every row says.
            block_tables: int32 [groups, slots, width].
            logit_tokens, inputs: as of `ForwardBatch`.
        """
        length, width = tokens.shape[1], block_tables.shape[2]
        token_ids = tokens.view(-1).index_select(0, spans.token_slots * length + spans.positions)
        columns = spans.positions // self._block_size
        places = spans.positions - columns * self._block_size
        cells = spans.token_slots * width + columns
        rows, tables = [], []
        for group in range(len(self._layout.windows)):
            blocks = block_tables[group].view(-1).index_select(0, cells).to(torch.int64)
            rows.append(
                ((blocks[:, None] * self._num_kv_heads + self._heads) * self._block_size + places[:, None]).flatten()
            )
            tables.append(block_tables[group].index_select(0, spans.slots))
        groups = tuple(
            GroupBatch(rows[view.group], self._plan(tables[view.group], spans, view.window))
            for view in self._layout.views
        )
        return ForwardBatch(
            token_ids=token_ids.to(torch.int64), positions=spans.positions if spans.text is None else spans.text,
            groups=groups, logit_tokens=logit_tokens, inputs=inputs,
        )  # fmt: skip


def uniform_spans(
    slots: Tensor, ends: Tensor, queries: int, counts: Tensor | None = None, scratch: int = 0
) -> DeviceSpans:
    """The last `queries` positions of each row; static in all but its tensors' content.

    Args:
        slots: int64 [rows].
        ends: int64 [rows], keys with this step; 0 is a row that pads.
        counts: int64 [rows], how many of these positions the row is to compute, the last ones; None is all. What is
            before them pads: it belongs to the scratch slot, whose blocks nobody reads.
    """
    rows, device = slots.shape[0], slots.device
    inside = torch.arange(queries, device=device)
    positions = (ends[:, None] - queries + inside).clamp_(min=0).view(-1)
    token_slots = slots[:, None].expand(rows, queries)
    if counts is not None:
        token_slots = torch.where(inside >= queries - counts[:, None], token_slots, scratch)
    starts = torch.arange(0, rows * queries, queries, dtype=torch.int32, device=device)
    return DeviceSpans(
        slots=slots, starts=starts, stops=starts + queries, context_lens=ends.to(torch.int32),
        token_slots=token_slots.reshape(-1), positions=positions, decode_rows=rows, queries=queries,
    )  # fmt: skip
