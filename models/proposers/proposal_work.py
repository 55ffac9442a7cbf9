"""The rows of a proposal while drafts are made for them, and how trees are grown for them."""

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.paged_attention.tree import TreeMask
from troupellm.models.batch.host_device import to_device, to_host
from troupellm.models.layers.attention import KVPair
from troupellm.models.proposers.base import ProposalBatch, RowDraws
from troupellm.models.proposers.choose_drafts import Guesser
from troupellm.models.proposers.draft_trees import Trees
from troupellm.models.proposers.paged_attention import Ints, Paging
from troupellm.models.proposers.paged_base import Network


class ProposalWork:
    """The rows that still draft, and where they are."""

    def __init__(self, batch: ProposalBatch, able: Ints, states: Tensor, device: torch.device) -> None:
        self.blocks, self.states = batch.blocks, states
        self.rows: Ints = np.arange(able.size)
        self.all_slots = self.slots = batch.slots[able]
        self.lengths = batch.lengths[able]
        self._draws = batch.draws.to(device).of(to_device(able, device))

    def draws(self, depth: int) -> tuple[RowDraws, Tensor]:
        """The draws of the drafts of that depth, and their positions."""
        return self._draws, to_device(self.lengths + depth, self.states.device)

    def keep(self, kept: Ints) -> None:
        """Go on with some of the rows."""
        index = to_device(kept, self.states.device)
        self.rows, self.slots, self.lengths = self.rows[kept], self.slots[kept], self.lengths[kept]
        self.states = self.states[index]
        self._draws = self._draws.of(index)


def grow_trees(
    network: Network,
    paging: Paging,
    caches: list[KVPair],
    guesser: Guesser,
    work: ProposalWork,
    widths: tuple[int, ...],
) -> Trees:
    """Trees by a network that reads states: every node of a level is gone on from, but those of the last one.

    A node's entry lies as far behind that of the row's last token as its number in the tree says, and sees its
    ancestors alone. The entries give way to those of what the model confirms.
    """
    rows, trees, first = work.rows.size, Trees(work.rows.size), 0
    seen = np.zeros((rows, 1), dtype=np.uint64)
    """For each node of the level before, itself and its ancestors as bits."""
    for depth, width in enumerate(widths):
        before = seen.shape[1]
        scores = network.scores(work.states)
        draws, positions = work.draws(depth)
        spread = draws.repeated(before)
        chosen, shares = guesser.several(
            scores, spread, positions.repeat_interleave(before), min(width, scores.shape[1])
        )
        tokens, parents = trees.grow(
            to_host(chosen.view(rows, before, -1)), to_host(shares.float().view(rows, before, -1)), width
        )
        if depth + 1 == len(widths):
            break
        numbers = np.arange(first, first + tokens.shape[1])
        seen = np.take_along_axis(seen, parents, 1) | (np.uint64(1) << numbers.astype(np.uint64))
        came = to_device((np.arange(rows)[:, None] * before + parents).reshape(-1), work.states.device)
        starts = work.lengths - 1 + first
        counts = np.full_like(starts, tokens.shape[1])
        places = np.repeat(starts - first, counts) + np.tile(numbers, rows)
        there = np.repeat(work.lengths - 1 + depth, counts)
        mask = TreeMask(work.lengths - 1, seen.reshape(-1), there)
        batch = paging.batch(
            work.blocks,
            work.slots,
            starts,
            counts,
            to_device(tokens.reshape(-1).copy(), paging.device),
            places,
            tree=mask,
        )
        work.states = network.forward(batch, work.states[came], caches)
        first += tokens.shape[1]
    return trees
