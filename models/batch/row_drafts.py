"""The drafts of a step: those that a proposer gives for its rows, and those of one row with the selection of kept ones.

Node 0 is the row's last token, node i + 1 its draft i. A chain is a tree without branches; `parents` is None for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from troupellm.protocol.config.speculation import MOST_DRAFTS

ROOT: Final = -1
"""In `Drafts.parents`: the row's last token."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for the rows of one `ProposalBatch`, in its order."""

    token_ids: NDArray[np.int32]
    """[rows, width]; a row's drafts come first, what lies behind them does not matter."""
    counts: NDArray[np.int64]
    """[rows] drafts of each row, from 0 to the row's limit."""
    parents: NDArray[np.int32] | None = None
    """[rows, width] of trees: index of each draft's parent among the row's drafts, smaller than its own, or ROOT.
    Siblings differ. None: chains, in which each draft follows the one before it."""
    confidence: NDArray[np.float32] | None = None
    """[rows, width] the proposer's own estimate, from 0 to 1, that a draft is kept given that its parent is."""


class DraftError(RuntimeError):
    """A proposer returned invalid drafts: a fault of its author."""


@dataclass(slots=True)
class RowDrafts:
    """Attributes:
    tokens: of the drafts.
    parents: index of each draft's parent, ROOT is the row's last token; None is a chain.
    """

    tokens: list[int]
    parents: list[int] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def keep(self, kept: Sequence[int]) -> None:
        """Leave out all others, with their descendants. kept: rising, parents included."""
        if len(kept) == len(self.tokens):
            return
        self.tokens = [self.tokens[index] for index in kept]
        if self.parents is not None:
            place = {ROOT: ROOT} | {index: number for number, index in enumerate(kept)}
            self.parents = [place[self.parents[index]] for index in kept]

    def accepted(self, drawn: Sequence[int]) -> list[int]:
        """The path of drafts that equal the model's token at each of their places.

        Args:
            drawn: the model's token behind every node.
        """
        path: list[int] = []
        if self.parents is None:
            for index, token in enumerate(self.tokens):
                if drawn[index] != token:
                    break
                path.append(index)
            return path
        node = ROOT
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent == node and drawn[node + 1] == token:  # a node's children come behind it, so one walk finds all
                path.append(index)
                node = index
        return path

    def depths(self) -> NDArray[np.int64]:
        """int64 [drafts]: how many drafts a draft follows."""
        if self.parents is None:
            return np.arange(len(self.tokens))
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent == ROOT else found[parent] + 1)
        return np.array(found, dtype=np.int64)

    def seen(self, window: int | None) -> NDArray[np.uint64]:
        """[drafts]: which drafts lead to each one, itself included, as bits; through a window only the last of them."""
        found: list[int] = []
        for index in range(len(self.tokens)):
            parent = index - 1 if self.parents is None else self.parents[index]
            found.append((found[parent] if parent != ROOT else 0) | 1 << index)
        if window is not None and window <= int(self.depths().max(initial=0)):
            found = [sum(1 << node for node in self.ancestors(index)[-window:]) for index in range(len(found))]
        return np.array(found, dtype=np.uint64)

    def ancestors(self, index: int) -> list[int]:
        """The drafts that lead to one, itself at the end."""
        if self.parents is None:
            return list(range(index + 1))
        path = [index]
        while (parent := self.parents[path[-1]]) != ROOT:
            path.append(parent)
        return path[::-1]


def read_drafts(drafts: Drafts, limits: Sequence[int], vocab: int) -> list[RowDrafts]:
    """Validate a proposer's drafts and divide them by row.

    Raises:
        DraftError: they do not match the request.
    """
    counts = drafts.counts.tolist()
    if len(counts) != len(limits) or len(drafts.token_ids) != len(limits):
        raise DraftError(f"drafts for {len(counts)} rows, not for the {len(limits)} that were asked for")
    found = []
    for row, (count, limit) in enumerate(zip(counts, limits, strict=True)):
        if not 0 <= count <= min(limit, MOST_DRAFTS):
            raise DraftError(f"{count} drafts for a row that takes 0..{min(limit, MOST_DRAFTS)}")
        tokens = drafts.token_ids[row, :count].tolist()
        if tokens and type(tokens[0]) is not int:  # they are compared with tokens, and become tokens
            raise DraftError("drafts are not whole numbers")
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            raise DraftError(f"a draft is outside the vocabulary, 0..{vocab - 1}")
        parents = None if drafts.parents is None else drafts.parents[row, :count].tolist()
        if parents is not None:
            if any(type(each) is not int or not ROOT <= each < index for index, each in enumerate(parents)):
                raise DraftError("a draft's parent is not one of the drafts before it")
            if len(set(zip(parents, tokens, strict=True))) < count:
                raise DraftError("two drafts behind the same one are equal")
            if parents == list(range(-1, count - 1)):
                parents = None
        found.append(RowDrafts(tokens, parents))
    return found
