"""The first and the last operations of a decode step in plain torch."""

import torch
from torch import Tensor

from troupellm.kernels.decode_io.spec import Beginning, Draws
from troupellm.kernels.sampling import draw
from troupellm.kernels.sampling.noise import position_keys
from troupellm.kernels.sampling.search import row_best
from troupellm.kernels.sampling.truncate import thresholds


def gathered(
    texts: Tensor, block_tables: Tensor, token_slots: Tensor, positions: Tensor, *, block_size: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    """The token ids of some positions, and the cache rows of their keys and values.

    Args:
        texts: int32 [slots, length].
        block_tables: int32 [groups, slots, width].
        token_slots, positions: int64 [tokens].

    Returns:
        token ids int64 [tokens], and int64 [groups, tokens * kv_heads], see `kernels.kv_write`.
    """
    token_ids = texts.view(-1).index_select(0, token_slots * texts.shape[1] + positions)
    columns = positions // block_size
    places = positions - columns * block_size
    cells = token_slots * block_tables.shape[2] + columns
    blocks = block_tables.flatten(1).index_select(1, cells).to(torch.int64)
    heads = torch.arange(kv_heads, device=texts.device)
    kv_rows = (blocks[:, :, None] * kv_heads + heads) * block_size + places[:, None]
    return token_ids.to(torch.int64), kv_rows.flatten(1)


def begin_reference(
    slots: Tensor,
    ends: Tensor,
    counts: Tensor | None,
    texts: Tensor,
    block_tables: Tensor,
    angle_table: Tensor | None,
    *,
    queries: int,
    block_size: int,
    kv_heads: int,
    scratch: int,
) -> Beginning:
    """As `begin`."""
    rows, device = slots.shape[0], slots.device
    inside = torch.arange(queries, device=device)
    positions = (ends[:, None] - queries + inside).clamp_(min=0).view(-1)
    token_slots = slots[:, None].expand(rows, queries)
    if counts is not None:
        token_slots = torch.where(inside >= queries - counts[:, None], token_slots, scratch)
    token_ids, kv_rows = gathered(
        texts, block_tables, token_slots.reshape(-1), positions, block_size=block_size, kv_heads=kv_heads
    )
    return Beginning(
        token_ids=token_ids,
        positions=positions,
        angles=None if angle_table is None else angle_table.index_select(0, positions),
        starts=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32, device=device),
        context_lens=ends.to(torch.int32),
        tables=block_tables.index_select(1, slots),
        kv_rows=kv_rows,
    )


def finish_reference(logits: Tensor, slots: Tensor, ends: Tensor, texts: Tensor, draws: Draws | None) -> Tensor:
    """As `finish`."""
    tokens, peaks = row_best(logits)
    if draws is not None:
        factors, limits = draws.scales[:, :1], draws.scales[:, 1:]
        scaled = (logits - peaks[:, None]).mul_(factors)
        scaled.masked_fill_(scaled < limits, -torch.inf)
        if draws.nucleus is not None:
            scaled.masked_fill_(scaled < thresholds(scaled, draws.nucleus), -torch.inf)
        drawn = draw(scaled, position_keys(draws.streams, ends), draws.codes)
        tokens = torch.where(factors[:, 0] > 0, drawn.clamp_(0, logits.shape[1] - 1), tokens)
    tokens = tokens.masked_fill((peaks.abs() < torch.inf).logical_not_(), -1)
    texts.view(-1).index_copy_(0, slots * texts.shape[1] + ends, tokens.clamp(min=0).to(torch.int32))
    return tokens
