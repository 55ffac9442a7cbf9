"""Turns the hidden states of a prompt into its vector: selects the tokens that count, and embeds or classifies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.models.config.pooling_config import Activation
from troupellm.protocol.messages.worker import RowError, RowPooled
from troupellm.protocol.params.pooling import PoolingState, PoolingType

_NOT_FINITE = "the model gave NaN or infinite numbers for this prompt"

Head = Callable[[Tensor], Tensor]
"""Pooled hidden states [rows, hidden] to logits [rows, labels]."""


@dataclass
class _Open:
    """A row that has not reached its end."""

    state: PoolingState
    total: Tensor | None = None
    """float32 [hidden]: the sum of the counted hidden states so far."""
    count: int = 0


class Pooler:
    """Gathers each row's counted hidden states over the spans of its prompt, and makes vectors. Calls come from one
    thread."""

    def __init__(
        self, *, head: Head | None = None, activation: Activation = "softmax", projection: Head | None = None
    ) -> None:
        """
        Args:
            head: of a classifier.
            projection: of an embedding, before its length is set to one.
            activation: applied to the classifier's logits.
        """
        self._head = head
        self._activation, self._projection = activation, projection
        self._rows: dict[int, _Open] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def add_row(self, row: int, state: PoolingState) -> None:
        """Make a row known, or replace an earlier row of that number completely."""
        self._rows[row] = _Open(state)

    def drop_row(self, row: int) -> None:
        """Forget a row; an unknown one is fine."""
        self._rows.pop(row, None)

    def wanted(self, row: int, start: int, count: int, *, ends: bool) -> tuple[int, int]:
        """The positions of a span that count, relative to it: first one and number, perhaps none.

        Args:
            ends: the span reaches the row's last token.
        """
        kind = self._rows[row].state.pooling_type
        if kind == "MEAN":
            return 0, count
        if kind == "CLS":
            return 0, int(start == 0)
        return count - 1, int(ends)

    def take(self, row: int, hidden: Tensor) -> None:
        """Add hidden states [positions, hidden] of the positions that `wanted` returned."""
        known = self._rows[row]
        if hidden.shape[0]:
            total = hidden.float().sum(dim=0)
            known.total = total if known.total is None else known.total + total
            known.count += hidden.shape[0]

    def finish(self, known_as: Sequence[int], rows: Sequence[int]) -> tuple[list[RowPooled], list[RowError]]:
        """The vectors of rows whose last token was taken.

        Args:
            known_as: the rows' numbers in `add_row`.
            rows: the rows' numbers in the result.
        """
        opened = [self._rows[row] for row in known_as]
        means = []
        for known in opened:
            assert known.total is not None
            means.append(known.total / known.count)
        return self.vectors(rows, [known.state for known in opened], torch.stack(means)) if means else ([], [])

    def vectors(
        self, rows: Sequence[int], states: Sequence[PoolingState], pooled: Tensor
    ) -> tuple[list[RowPooled], list[RowError]]:
        """Embed or classify pooled hidden states, float32 [rows, hidden], in the order of `rows`."""
        groups: dict[tuple[bool, bool, int], list[int]] = {}
        for index, state in enumerate(states):
            groups.setdefault((state.task == "embed", state.activation, state.dimensions), []).append(index)
        found: dict[int, RowPooled] = {}
        errors: list[RowError] = []
        for (embeds, activation, dimensions), members in groups.items():
            part = pooled if len(groups) == 1 else pooled[members]
            values = self._embed(part, activation, dimensions) if embeds else self._classify(part, activation)
            sound = values.isfinite().all(dim=1).tolist()
            lines = values.contiguous().numpy()
            for line, member, good in zip(lines, members, sound, strict=True):
                if good:
                    found[member] = RowPooled(rows[member], line.tobytes())
                else:
                    errors.append(RowError(rows[member], _NOT_FINITE))
        return [found[index] for index in sorted(found)], errors

    def _embed(self, pooled: Tensor, activation: bool, dimensions: int) -> Tensor:
        if self._projection is not None:
            pooled = self._projection(pooled)
        if dimensions:
            pooled = pooled[:, :dimensions]
        return functional.normalize(pooled, dim=1) if activation else pooled

    def _classify(self, pooled: Tensor, activation: bool) -> Tensor:
        if self._head is None:
            raise RuntimeError("this model has no classifier")
        logits = self._head(pooled).float()
        if not activation or self._activation == "identity":
            return logits
        return logits.sigmoid() if self._activation == "sigmoid" else logits.softmax(dim=1)


def pool_whole(hidden: Tensor, counts: Sequence[int], pooling_type: PoolingType) -> Tensor:
    """The vectors of prompts that were computed at once.

    Args:
        hidden: [tokens, hidden], prompt after prompt; rows behind the last one are ignored.
        counts: tokens of each.

    Returns:
        float32 [prompts, hidden].
    """
    lengths = torch.tensor(counts)
    ends = lengths.cumsum(0)
    if pooling_type == "CLS":
        return hidden[ends - lengths].float()
    if pooling_type == "LAST":
        return hidden[ends - 1].float()
    owners = torch.repeat_interleave(torch.arange(len(counts)), lengths)
    sums = torch.zeros(len(counts), hidden.shape[1], dtype=torch.float32)
    sums.index_add_(0, owners, hidden[: owners.shape[0]].float())
    return sums / lengths[:, None]
