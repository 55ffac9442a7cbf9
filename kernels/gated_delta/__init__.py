"""The gated delta rule: a matrix per head that remembers values by keys, forgets, and corrects what it said of a key.

    S = exp(g) S;  S = S + beta k (v - k S);  out = q S

Of Yang et al. 2024, "Gated Delta Networks"; several tokens of a row at a time by its section 3.3, the WY form. Without
the correction, S = exp(g) S + k v, it is the recurrence of Mamba-2 (Dao and Gu 2024).
"""

import torch
from torch import Tensor

from troupellm.kernels.short_conv.spans import ConvSpans

CHUNK = 64
"""Tokens of a row that are computed together."""
GROUP_BYTES = 512 << 10
"""States of rows with one token that are computed together, so that they stay in the cache; at least one row's."""


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, spans: ConvSpans
) -> Tensor:
    """Compute some rows' tokens behind their states, and leave the states behind them.

    Args:
        query, key: float32 [tokens, key_heads, key_size]; each serves value_heads / key_heads heads of values.
        value: float32 [tokens, value_heads, value_size].
        decay: float32 [tokens, value_heads], g: logarithms, none above 0.
        beta: float32 [tokens, value_heads]; None corrects nothing.
        state: float32 [slots, value_heads, key_size, value_size].
        spans: the rows in the batch.

    Returns:
        float32 [tokens, value_heads, value_size].
    """
    shared = value.shape[1] // key.shape[1]
    if shared > 1:
        query, key = query.repeat_interleave(shared, 1), key.repeat_interleave(shared, 1)
    out = torch.empty_like(value)
    slots, counts, row, begin = spans.slots.tolist(), spans.counts.tolist(), 0, 0
    most = max(1, GROUP_BYTES // (state[0].numel() * state.element_size()))
    while row < len(slots):
        if counts[row] == 1:
            rows = _decodes(counts, row, most)
            piece = slice(begin, begin + rows)
            held = state[slots[row] : slots[row] + 1] if rows == 1 else state[spans.slots[row : row + rows]]
            corrections = None if beta is None else beta[piece]
            out[piece] = _step(query[piece], key[piece], value[piece], decay[piece], corrections, held)
            if rows > 1:
                state[spans.slots[row : row + rows]] = held
            row, begin = row + rows, begin + rows
            continue
        end = begin + counts[row]
        for first in range(begin, end, CHUNK):
            piece = slice(first, min(first + CHUNK, end))
            corrections = None if beta is None else beta[piece]
            out[piece] = _chunk(query[piece], key[piece], value[piece], decay[piece], corrections, state[slots[row]])
        row, begin = row + 1, end
    return out


def _decodes(counts: list[int], row: int, most: int) -> int:
    """How many rows from `row` on have one token, up to `most`."""
    last = min(row + most, len(counts))
    return next((other for other in range(row, last) if counts[other] > 1), last) - row


def _step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, held: Tensor) -> Tensor:
    """One token of each row. held: [rows, heads, key_size, value_size], their states, changed in place."""
    held *= decay.exp()[:, :, None, None]
    if beta is not None:
        value = (value - torch.einsum("rhk,rhkv->rhv", key, held)) * beta[..., None]
    held += key[..., None] * value[:, :, None]
    return torch.einsum("rhk,rhkv->rhv", query, held)


def _chunk(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, held: Tensor) -> Tensor:
    """Some tokens of one row. held: [heads, key_size, value_size], its state, changed in place."""
    query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    since = decay.T.double().cumsum(1)
    """[heads, tokens], how much has been forgotten of what was there before the chunk: differences of large sums."""
    between = (since[:, :, None] - since[:, None]).tril().exp().tril().float()
    kept = since.exp().float()[..., None]
    change = value
    if beta is not None:
        weighed = key * beta.T[..., None]
        mixing = torch.eye(key.shape[1]) + (weighed @ key.mT * between).tril(-1)
        told = value * beta.T[..., None] - (weighed * kept) @ held
        change = torch.linalg.solve_triangular(mixing, told, upper=False, unitriangular=True)
    out = (query * kept) @ held + (query @ key.mT * between) @ change
    left = (since[:, -1:] - since).exp().float()[..., None]
    held.mul_(kept[:, -1:]).add_((key * left).mT @ change)
    return out.transpose(0, 1)
