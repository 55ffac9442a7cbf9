"""One step's verification: the positions that its rows compute, and the choice of kept drafts.

The drafts of a row are computed behind its tokens. The model draws a token behind its last token and behind every
draft,
each with the history and the position that it would have without speculation: as "virtual rows" of one sampler call. So
all options of a row (penalties, bias, bad words, plug-ins, thinking budgets, guides) apply to each of them by itself. A
draft is kept if it equals the token drawn in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.paged_attention.tree import NO_TREE, TreeMask
from troupellm.models.batch.row_drafts import RowDrafts
from troupellm.models.batch.row_table import RowTable
from troupellm.models.batch.spans import Spans
from troupellm.models.sampling.sampler import Sampled
from troupellm.protocol.messages.worker import RowError, RowLogprobs

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Verdict:
    """The tokens that one row keeps of a step.

    Attributes:
        tokens: new tokens of the row, none if it failed.
        path: the kept drafts, without the last token. That one counts as drawn although it may equal a draft, too: its
            keys and values are computed in the next step.
    """

    tokens: list[int]
    path: list[int]

    @property
    def accepted(self) -> int:
        """The number of kept drafts: one less than tokens."""
        return len(self.path)

    def cut(self, count: int) -> None:
        """Keep only this many of the tokens."""
        del self.tokens[count:]
        del self.path[max(0, count - 1) :]


class VirtualHistories(Sequence[Tensor]):
    """The history of each virtual row: its row's tokens, then the drafts that lead to it."""

    def __init__(
        self, rows: RowTable, slots: Sequence[int], lengths: Sequence[int], paths: dict[int, tuple[RowDrafts, int]]
    ) -> None:
        """
        Args:
            slots, lengths: of every virtual row; the table holds its drafts behind the row's tokens.
            paths: by virtual row, its tree and node in it: the table has the nodes in another order.
        """
        self._rows, self._slots, self._lengths, self._paths = rows, slots, lengths, paths

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:  # type: ignore[override]
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]  # type: ignore[misc]
        tokens = self._rows.tokens[self._slots[index], : self._lengths[index]]
        found = self._paths.get(index)
        if found is None:
            return tokens
        drafts, node = found
        path = [drafts.tokens[place] for place in drafts.ancestors(node)]
        own = tokens[: self._lengths[index] - len(path)]
        return torch.cat((own, torch.tensor(path, dtype=tokens.dtype, device=tokens.device)))


@dataclass(slots=True)
class VerifyBatch:
    """The spans and drafts of a step in which some rows are speculative.

    Attributes:
        spans: the rows that compute anything; `counts` include their drafts.
        speculative: bool [rows of `spans`].
        drafts: by row of `spans`.
        lengths: tokens of each of these rows.
    """

    spans: Spans
    speculative: NDArray[np.bool_]
    lengths: Ints
    drafts: dict[int, RowDrafts] = field(default_factory=dict)

    @property
    def trees(self) -> bool:
        return any(drafts.parents is not None for drafts in self.drafts.values())

    def unusual(self, planned: int) -> bool:
        """True if any row has drafts, or not all of the `planned` ones compute something."""
        return bool(self.drafts) or self.spans.slots.size < planned

    def positions(self, spans: Spans, places: Ints, owner: Ints) -> Ints:
        """Positions of tokens in the text, [tokens].

        Args:
            spans: a piece of the step's.
            places: in the cache, [tokens].
            owner: [tokens] index of each token's span.
        """
        found = places.copy()
        for index, row in self._tree_rows(spans):
            first = int(self.lengths[row])
            nodes = np.flatnonzero((owner == index) & (places >= first))
            found[nodes] = first + self.drafts[row].depths()[places[nodes] - first]
        return found

    def tree(self, spans: Spans, places: Ints, owner: Ints, positions: Ints, window: int | None) -> TreeMask | None:
        """The mask of a piece's tokens through a window; None if none of them is in a tree."""
        rows = self._tree_rows(spans)
        if not rows:
            return None
        bases = np.full(spans.slots.size, NO_TREE, dtype=np.int64)
        seen = np.zeros(places.size, dtype=np.uint64)
        for index, row in rows:
            first = bases[index] = int(self.lengths[row])
            nodes = np.flatnonzero((owner == index) & (places >= first))
            seen[nodes] = self.drafts[row].seen(window)[places[nodes] - first]
        return TreeMask(bases, seen, positions)

    def _tree_rows(self, spans: Spans) -> list[tuple[int, int]]:
        """Index within a piece and row of the step, where a row has a tree."""
        if not self.trees:
            return []
        place = {index: row for row, index in enumerate(self.spans.rows.tolist())}
        rows = [place[index] for index in spans.rows.tolist()]
        return [
            (index, row)
            for index, row in enumerate(rows)
            if row in self.drafts and self.drafts[row].parents is not None
        ]

    def draft_counts(self) -> Ints:
        """[rows of `spans`]."""
        found = np.zeros(self.spans.slots.size, dtype=np.int64)
        for row, drafts in self.drafts.items():
            found[row] = len(drafts)
        return found

    def histories(self, rows: RowTable, sampling: NDArray[np.bool_]) -> tuple[list[int], list[int], VirtualHistories]:
        """Of the sampling rows' virtual rows: the row, the position of its draw, and its history."""
        drawing = np.flatnonzero(sampling)
        times = self.draft_counts()[drawing] + 1
        owner = np.repeat(drawing, times)
        node = np.arange(owner.size) - np.repeat(np.cumsum(times) - times, times)
        positions = self.lengths[owner] + node
        paths: dict[int, tuple[RowDrafts, int]] = {}
        if self.trees:
            first = 0
            for row, count in zip(drawing.tolist(), times.tolist(), strict=True):
                drafts = self.drafts.get(row)
                if drafts is not None and drafts.parents is not None:
                    paths |= {first + 1 + node: (drafts, node) for node in range(len(drafts))}
                    positions[first + 1 : first + count] = self.lengths[row] + 1 + drafts.depths()
                first += count
        found = positions.tolist()
        return owner.tolist(), found, VirtualHistories(rows, self.spans.slots[owner].tolist(), found, paths)

    def verify(self, sampling: NDArray[np.bool_], values: Sequence[int], accept: "Acceptance") -> dict[int, Verdict]:
        """The tokens that each sampling row keeps, by row of `spans`.

        Args:
            values: the token that each virtual row has drawn, -1 where it failed.
        """
        found: dict[int, Verdict] = {}
        first = 0
        for row in np.flatnonzero(sampling).tolist():
            drafts = self.drafts.get(row)
            if drafts is None:
                value = values[first]
                found[row] = Verdict([value] if value >= 0 else [], [])
                first += 1
                continue
            drawn = values[first : first + 1 + len(drafts)]
            first += 1 + len(drafts)
            path = accept(row, drafts, drawn)
            tokens = [*(drafts.tokens[index] for index in path), drawn[path[-1] + 1 if path else 0]]
            found[row] = Verdict(tokens, path)
            if tokens[-1] < 0:  # the draft before it is computed again, and if the row fails, it does then
                found[row].cut(len(path))
        return found


class Acceptance:
    """Chooses the kept drafts of a row. Called with the row of `VerifyBatch.spans`."""

    def __call__(self, row: int, drafts: RowDrafts, drawn: Sequence[int]) -> list[int]:
        """The path that is kept; `drawn` is the model's token behind every node."""
        return drafts.accepted(drawn)


def kept_logprobs(
    sampled: Sampled,
    sampling: NDArray[np.bool_],
    verdict: dict[int, Verdict],
    verify_batch: VerifyBatch,
    rows: Sequence[int],
) -> list[RowLogprobs]:
    """One entry per row that asked for it and got tokens; waits for the device.

    Args:
        rows: the numbers of the rows of `spans`.
    """
    if not sampled.logprob_parts:
        return []
    owner_of: dict[int, int] = {}
    first = 0
    for row in np.flatnonzero(sampling).tolist():
        owner_of[first] = row
        first += 1 + len(verify_batch.drafts.get(row, ()))
    found = []
    for part in sampled.logprob_parts:
        place_of = {member: place for place, member in enumerate(part.members)}
        columns = [tensor.cpu().numpy() for tensor in (part.ids, part.values, part.ranks)]
        others = None if part.other_ranks is None else part.other_ranks.cpu().numpy()
        for member in part.members:
            owner = owner_of.get(member)
            if owner is None or not verdict[owner].tokens:
                continue
            nodes = [0, *(index + 1 for index in verdict[owner].path)]
            places = [place_of[member + node] for node in nodes]
            ids, values, ranks = (column[places] for column in columns)
            found.append(
                RowLogprobs(
                    row=rows[owner],
                    position=int(verify_batch.lengths[owner]),
                    width=ids.shape[1],
                    token_ids=ids.tobytes(),
                    logprobs=values.tobytes(),
                    ranks=ranks.tobytes(),
                    other_ranks=b"" if others is None else others[places].tobytes(),
                )
            )
    return found


def row_errors(
    sampled: Sampled, sampling: NDArray[np.bool_], verdict: dict[int, Verdict], verify_batch: VerifyBatch
) -> list[RowError]:
    """Errors of the rows that got no token."""
    if all(found.tokens for found in verdict.values()):
        return []
    by_index = sampled.errors_by_index
    found = []
    first = 0
    for row in np.flatnonzero(sampling).tolist():
        if not verdict[row].tokens:
            found.append(by_index[first])
        first += 1 + len(verify_batch.drafts.get(row, ()))
    return found
