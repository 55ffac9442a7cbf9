"""Grows trees of drafts level by level: the jointly likeliest continuations of a level form the next one."""

import numpy as np
from numpy.typing import NDArray

from troupellm.models.batch.row_drafts import ROOT, Drafts

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Trees:
    """One tree per row, all of the same shape until they are cut."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._tokens: list[Ints] = []
        self._parents: list[Ints] = []
        self._shares: list[Floats] = []
        self._joint: list[Floats] = []
        self._first = 0
        """Index of the level's first node."""

    def grow(self, tokens: Ints, shares: Floats, width: int) -> tuple[Ints, Ints]:
        """Add a level.

        Args:
            tokens: [rows, parents, candidates] that may follow the first `parents` nodes of the level before, or the
                root.
            shares: of them, logarithms; falling along the last axis.
            width: nodes of the new level; fewer if there are fewer candidates.

        Returns:
            the nodes' tokens [rows, width], best first, and which of the `parents` each one follows.
        """
        rows, parents, each = tokens.shape
        before = self._joint[-1][:, :parents] if self._joint else np.zeros((rows, 1), dtype=np.float32)
        joint = (before[:, :, None] + shares).reshape(rows, parents * each)
        order = np.argsort(-joint, axis=1, kind="stable")[:, :width]
        chosen = np.take_along_axis(tokens.reshape(rows, -1), order, 1)
        self._parents.append(order // each + self._first if self._tokens else np.full_like(order, ROOT))
        self._first = sum(level.shape[1] for level in self._tokens)
        self._tokens.append(chosen)
        self._shares.append(np.take_along_axis(shares.reshape(rows, -1), order, 1))
        self._joint.append(np.take_along_axis(joint, order, 1))
        return chosen, order // each

    def cut(self, limits: Ints) -> Drafts:
        """The trees with at most `limits` [rows] nodes each: the jointly likeliest, whose parents are likelier."""
        tokens, parents, shares, joint = (
            np.concatenate(parts, axis=1) for parts in (self._tokens, self._parents, self._shares, self._joint)
        )
        counts = np.minimum(limits, tokens.shape[1])
        for row in np.flatnonzero(counts < tokens.shape[1]).tolist():
            kept = np.sort(np.argsort(-joint[row], kind="stable")[: counts[row]])
            place = np.full(tokens.shape[1] + 1, ROOT)
            place[kept] = np.arange(kept.size)
            for part in (tokens, shares):
                part[row, : kept.size] = part[row, kept]
            parents[row, : kept.size] = place[parents[row, kept]]
        return Drafts(
            token_ids=tokens.astype(np.int32),
            counts=counts.astype(np.int64),
            parents=parents.astype(np.int32),
            confidence=np.exp(shares).astype(np.float32),
        )
