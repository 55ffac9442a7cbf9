"""Drafting with a network that has its own keys and values, in the blocks of the model's rows.

A position's entry (the network's keys and values) depends only on the row's tokens up to there, and on one more for a
network that reads states. It is written as soon as the model has confirmed these tokens. A block that comes back, by a
prefix hit, a fork, or from an outer tier, therefore brings the drafter's entries with it. After a preemption they are
computed again with the model's. While drafts do not pay, no entries are written. A network that reads tokens reads them
later. For one that reads states, the states are lost, and its rows continue without (`gaps`). The same applies to rows
that share blocks of that time (`marks`). A block whose beginning alone was copied gets no mark: behind a block with
entries it is assumed to have them. The few that its row had yet to make are wrong there, which hardly costs a draft.

At the end of a block, the further token is in the next block, where rows that share the block may differ. Such a row
rewrites the entry at the end of the found blocks with its own token, from a state that is kept with each block for this
purpose. Among rows that run together, the last one to come has the right entry. The others have a single key that was
made with another token, which cannot change their text and hardly costs a draft.

Entries of drafts are written at the places of later true tokens, which overwrite them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.batch.host_device import to_device, to_host
from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.batch.spans import Spans
from troupellm.models.layers.attention import KVPair
from troupellm.models.proposers.base import Observation, ProposalBatch
from troupellm.models.proposers.choose_drafts import Guesser
from troupellm.models.proposers.merge_drafts import as_trees, joined, spread
from troupellm.models.proposers.paged_attention import Ints, Paging, positions_of
from troupellm.models.proposers.paged_base import Network
from troupellm.models.proposers.paged_drafter_blocks import DrafterBlocks, reread
from troupellm.models.proposers.paged_pending_states import PendingStates
from troupellm.models.proposers.proposal_work import ProposalWork, grow_trees
from troupellm.protocol.messages.worker import NewRow

PIECE_TOKENS = 512
"""Entries that go through the network together."""
UNKNOWN = -1


class PagedProposer:
    """A `Proposer`. One state per slot is kept between steps, and nothing else."""

    def __init__(
        self,
        network: Network,
        paging: Paging,
        caches: list[KVPair],
        guesser: Guesser,
        *,
        longest: int,
        dtype: torch.dtype,
        widths: tuple[int, ...] = (),
        borders: Tensor | None = None,
        marks: DrafterBlocks | None = None,
    ) -> None:
        """
        Args:
            longest: tokens of a row that is drafted for, its drafts included.
            dtype: of the network's states.
            widths: nodes per level of a tree; empty drafts chains.
            borders: as of `KVCache`, for a network that reads states.
            marks: of blocks that are shared; None trusts them all.
        """
        self.aux_hidden_states, self._borders, self._marks = network.aux_hidden_states, borders, marks
        self._network, self._paging, self._caches, self._guesser = network, paging, caches, guesser
        self._longest, self._widths = longest, widths
        self._behind = 1 if network.reads_states else 0
        """Distance from a token back to the entry that contains it."""
        self._states = torch.empty(0, network.width, dtype=dtype, device=paging.device)
        """By slot, the state from which the next draft is made."""
        self._ready: Ints = np.zeros(0, dtype=np.int64)
        """Tokens that the row had then; 0 is none."""
        self._covered: Ints = np.zeros(0, dtype=np.int64)
        """For a network that reads tokens: the number of tokens with an entry. UNKNOWN before anything was computed."""
        self._drafted: NDArray[np.int64] = np.zeros((0, 0), dtype=np.int64)
        """[slots, drafts] behind those, entries of drafts; UNKNOWN is none."""
        self._prompts: Ints = np.zeros(0, dtype=np.int64)
        """Tokens of each row's prompt, which forks may share up to the last one."""
        self._pending = PendingStates(network.width, dtype, paging.device)
        """States without entries, for a network that reads states."""
        self._lost: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        """Slots of rows whose last states were not seen."""
        self._unchecked: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        """Slots of rows whose shared blocks were not looked at."""
        self._marked: Ints = np.zeros(0, dtype=np.int64)
        """For a network that reads tokens: positions up to which a row's blocks have marks."""
        self._first: Ints = np.zeros(0, dtype=np.int64)
        """For a network that reads states: the position of a row's first own entry."""

    def add_row(self, slot: int, new: NewRow) -> None:
        """As `Proposer.add_row`."""
        missing = slot + 1 - self._ready.size
        if missing > 0:
            more = max(missing, self._ready.size)
            self._ready = np.concatenate((self._ready, np.zeros(more, dtype=np.int64)))
            self._covered = np.concatenate((self._covered, np.zeros(more, dtype=np.int64)))
            self._prompts = np.concatenate((self._prompts, np.zeros(more, dtype=np.int64)))
            self._lost = np.concatenate((self._lost, np.zeros(more, dtype=np.bool_)))
            self._unchecked = np.concatenate((self._unchecked, np.zeros(more, dtype=np.bool_)))
            self._marked = np.concatenate((self._marked, np.zeros(more, dtype=np.int64)))
            self._first = np.concatenate((self._first, np.zeros(more, dtype=np.int64)))
            if self._network.reads_states:
                self._pending.grow(self._ready.size)
            self._drafted = np.pad(self._drafted, ((0, more), (0, 0)), constant_values=UNKNOWN)
            self._states = torch.cat((self._states, self._states.new_zeros(more, self._states.shape[1])))
        self._ready[slot], self._covered[slot], self._drafted[slot] = 0, UNKNOWN, UNKNOWN
        self._prompts[slot], self._lost[slot] = new.num_prompt_tokens, False
        self._unchecked[slot], self._marked[slot], self._first[slot] = True, 0, 0
        self._paging.gaps.close(slot)
        if self._network.reads_states:
            self._pending.restart(np.array([slot]), np.array([UNKNOWN]))

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        """As `Proposer.drop_row`."""
        self._ready[slot], self._covered[slot] = 0, UNKNOWN

    def reset(self) -> None:
        """As `Proposer.reset`."""
        self._ready[:], self._covered[:], self._drafted[:], self._lost[:] = 0, UNKNOWN, UNKNOWN, False
        self._paging.gaps.close_all()
        self._pending.restart(np.arange(self._pending.counts.size), np.array([UNKNOWN]))

    @torch.inference_mode()
    def observe(self, seen: Observation) -> None:
        """As `Proposer.observe`: what completes a block gets its entries, since it may be shared from now on, and so do
        prompts; the rest waits for the next drafts, and many tokens cost little more than one."""
        self._check(seen.slots, seen.starts, seen.blocks)
        early = np.clip(self._first[seen.slots] - seen.starts, 0, seen.counts)
        if early.any():
            seen = _without(seen, early)
        wanted = (seen.counts > 0) & (seen.starts + seen.counts < self._longest)
        missed = self._lost[seen.slots]
        if missed.any():
            wanted &= ~missed | self._paging.gaps.may_open(seen.starts)
        kept = np.flatnonzero(wanted)
        slots, starts, counts = seen.slots[kept], seen.starts[kept], seen.counts[kept]
        if not slots.size:
            return
        if not self._network.reads_states:
            self._keep_up(slots, starts, starts + counts, seen)
            return
        hidden = seen.hidden
        if kept.size < seen.slots.size:
            hidden = hidden[self._index(np.flatnonzero(np.repeat(wanted, seen.counts)))]
        self._resume(slots, starts)
        self._renew_borders(slots, starts, seen)
        states = self._network.states(hidden)
        self._keep_borders(slots, starts, counts, seen.blocks, states)
        pending = self._pending
        lost = pending.starts[slots] + pending.counts[slots] != starts
        pending.restart(slots[lost], starts[lost])
        at_once = (starts < self._prompts[slots]) | ~pending.takes(slots, counts)
        if at_once.any():
            self._catch_up(slots[at_once], seen.tokens, seen.blocks)
            self._compute_all(
                slots[at_once],
                starts[at_once],
                counts[at_once],
                seen.tokens,
                seen.blocks,
                states if at_once.all() else states[self._index(np.flatnonzero(np.repeat(at_once, counts)))],
            )
            pending.restart(slots[at_once], starts[at_once] + counts[at_once])
        if not at_once.all():
            later = ~at_once
            part = states if later.all() else states[self._index(np.flatnonzero(np.repeat(later, counts)))]
            pending.append(slots[later], counts[later], part)
            self._catch_up(
                slots[later & self._completes(slots, starts + counts, pending.starts)], seen.tokens, seen.blocks
            )
        if self._marks is not None:
            # Entries of a row that continued inside a block are not at their positions: other rows must not read them.
            lying = self._paging.gaps.shift(slots) % self._paging.block_size == 0
            self._marks.put(seen.blocks, slots[lying], starts[lying], (starts + counts)[lying])

    def miss(self, slots: Ints, starts: Ints) -> None:
        """As `Sleeper.miss`. Tokens are read later. States are lost, even those of entries that are still to be made,
        since their blocks may be gone when the row continues."""
        new = self._covered[slots] == UNKNOWN
        self._covered[slots[new]] = starts[new]
        if self._network.reads_states:
            self._lost[slots] = True
            self._pending.restart(slots, np.where(new, starts, self._pending.starts[slots]))

    def _check(self, slots: Ints, starts: Ints, blocks: NDArray[np.int32]) -> None:
        """Check rows that begin behind shared blocks, some of which may lack entries. From there on tokens are read
        again, unless they are too many; a network that reads states continues behind a gap."""
        slots, starts = slots[self._unchecked[slots]], starts[self._unchecked[slots]]
        if not slots.size:
            return
        self._unchecked[slots] = False
        begins = np.where(self._covered[slots] == UNKNOWN, starts, self._covered[slots])
        size, whole = self._paging.block_size, begins // self._paging.block_size
        lead, trail = (whole, whole) if self._marks is None else self._marks.runs(blocks, slots, whole)
        if self._network.reads_states:
            nothing = (lead < whole) & (trail == whole)
            # Where a block has none, a beginning of the next one that was copied has none either. The row's own begin
            # with the one behind that: they lie at their positions, where others may read them and windows keep them.
            behind = np.where(nothing, -(-begins // size) * size, np.maximum(lead, trail) * size)
            self._first[slots[nothing]] = behind[nothing]
            # Nothing in front of them is read, nor made anew.
            self._covered[slots[nothing]] = 0
        else:  # a beginning of a block that was copied is read again, too
            begin, passed = reread(lead, trail, whole, size)
            self._covered[slots] = self._marked[slots] = begin * size
            behind = passed * size
        bare = lead * size < behind
        if bare.any():
            self._paging.gaps.open(slots[bare], lead[bare] * size, behind[bare])

    def _resume(self, slots: Ints, starts: Ints) -> None:
        """Rows that are seen again after some time have their next entries from here on."""
        lost = self._lost[slots]
        if lost.any():
            slots, starts = slots[lost], starts[lost]
            self._paging.gaps.open(slots, self._pending.starts[slots], starts)
            self._pending.restart(slots, starts)
            self._lost[slots] = False

    def _completes(self, slots: Ints, ends: Ints, done: Ints) -> NDArray[np.bool_]:
        """True for rows that have a block before `ends` [rows] that is not done up to its last position."""
        size = self._paging.block_size
        found: NDArray[np.bool_] = ends // size * size > done[slots]
        return found

    def _catch_up(self, slots: Ints, tokens: Tensor, blocks: NDArray[np.int32]) -> None:
        """For a network that reads states: make the entries that rows have pending."""
        slots = slots[self._pending.counts[slots] > 0]
        if slots.size:
            starts, counts = self._pending.starts[slots], self._pending.counts[slots]
            self._compute_all(slots, starts, counts, tokens, blocks, self._pending.of(slots))
            self._pending.restart(slots, starts + counts)

    @torch.inference_mode()
    def propose(self, batch: ProposalBatch) -> Drafts:
        """As `Proposer.propose`."""
        limits = np.minimum(batch.limits, self._longest - batch.lengths)
        if not self._network.reads_states:
            known = (limits > 0) & (self._covered[batch.slots] != UNKNOWN)
            if known.any():
                self._check(batch.slots[known], batch.lengths[known], batch.blocks)
                self._read(batch.slots[known], batch.lengths[known], batch.tokens, batch.blocks)
        else:
            self._catch_up(batch.slots[limits > 0], batch.tokens, batch.blocks)
        limits = np.where(self._ready[batch.slots] == batch.lengths, np.maximum(limits, 0), 0)
        able = np.flatnonzero(limits)
        if not able.size:
            return Drafts(np.zeros((limits.size, 0), dtype=np.int32), np.zeros_like(limits))
        if not self._widths:
            return self._drafted_by(self._chains, batch, limits, able)
        # Entries of a tree whose last level alone is cut lie within the row's blocks, those of a smaller one need not.
        whole = limits > sum(self._widths[:-1])
        found = [
            self._drafted_by(draft, batch, limits, np.flatnonzero(limits * part))
            for draft, part in ((self._trees, whole), (self._chains, ~whole))
            if (limits * part).any()
        ]
        return joined([as_trees(part) for part in found])

    def _drafted_by(
        self, draft: Callable[[ProposalWork, Ints], Drafts], batch: ProposalBatch, limits: Ints, rows: Ints
    ) -> Drafts:
        """Drafts of some of a batch's rows, among those of all."""
        work = ProposalWork(batch, rows, self._states[self._index(batch.slots[rows])], self._paging.device)
        found = draft(work, limits[rows])
        return found if rows.size == limits.size else spread(found, rows, limits.size)

    def _trees(self, work: ProposalWork, limits: Ints) -> Drafts:
        return grow_trees(self._network, self._paging, self._caches, self._guesser, work, self._widths).cut(limits)

    def _chains(self, work: ProposalWork, limits: Ints) -> Drafts:
        rows, width = limits.size, int(limits.max())
        device = self._paging.device
        found = torch.full((width, rows), UNKNOWN, dtype=torch.int64, device=device)
        for depth in range(width):
            kept = np.flatnonzero(limits[work.rows] > depth)
            if kept.size < work.rows.size:
                work.keep(kept)
            chosen = self._guesser.one(self._network.scores(work.states), *work.draws(depth))
            found[depth].index_copy_(0, self._index(work.rows), chosen)
            if depth + 1 < width:
                self._deeper(work, depth, chosen)
        tokens = to_host(found).T  # all drafts of all rows: the only wait for the device
        if not self._network.reads_states:
            self._drafted = _fitting(self._drafted, width)
            self._drafted[work.all_slots] = UNKNOWN
            # The last draft of the longest rows has no entry.
            entered = np.where(np.arange(width) < width - 1, tokens, UNKNOWN)
            self._drafted[work.all_slots, :width] = entered
        return Drafts(tokens.astype(np.int32), limits)

    def _deeper(self, work: ProposalWork, depth: int, tokens: Tensor) -> None:
        """Enter a draft of each row, the one of that depth."""
        positions = work.lengths + depth - self._behind
        batch = self._paging.batch(work.blocks, work.slots, positions, np.ones_like(positions), tokens, positions)
        work.states = self._network.forward(batch, work.states if self._behind else None, self._caches)

    def _renew_borders(self, slots: Ints, starts: Ints, seen: Observation) -> None:
        """Rows that begin behind a block that others computed write the entry at its end anew."""
        new = self._covered[slots] == UNKNOWN
        self._covered[slots[new]] = 0
        new &= (starts > 0) & (starts % self._paging.block_size == 0)
        if self._borders is None or not new.any():
            return
        slots, places = slots[new], starts[new] - 1
        states = self._borders[self._index(self._paging.blocks_at(seen.blocks, slots, places))]
        there = np.flatnonzero(to_host(states.any(dim=1)))
        if there.size:
            spans = Spans(there, slots[there], places[there], np.ones_like(there))
            self._compute(spans, seen.tokens, seen.blocks, states[self._index(there)].to(self._states.dtype))

    def _keep_borders(self, slots: Ints, starts: Ints, counts: Ints, blocks: NDArray[np.int32], states: Tensor) -> None:
        """The states of positions at the end of their block."""
        if self._borders is None:
            return
        positions = positions_of(starts, counts)
        ends = np.flatnonzero((positions + 1) % self._paging.block_size == 0)
        if ends.size:
            owners = np.repeat(slots, counts)[ends]
            index = self._index(self._paging.blocks_at(blocks, owners, positions[ends]))
            self._borders[index] = states[self._index(ends)].float()

    def _keep_up(self, slots: Ints, starts: Ints, ends: Ints, seen: Observation) -> None:
        """`observe` for a network that reads tokens."""
        self._recall(slots, ends, seen.tokens)
        due = (starts < self._prompts[slots]) | self._completes(slots, ends, self._covered)
        if due.any():
            self._read(slots[due], ends[due], seen.tokens, seen.blocks)
        if self._marks is not None:
            self._marks.put(seen.blocks, slots, self._marked[slots], ends)
            self._marked[slots] = ends

    def _recall(self, slots: Ints, lengths: Ints, tokens: Tensor) -> None:
        """Count the drafts that were kept among the tokens that have their entries, and forget the others."""
        width = self._drafted.shape[1]
        if width:
            places = self._covered[slots][:, None] + np.arange(width)
            inside = places < lengths[:, None]
            index = self._index(slots)[:, None], self._index(np.where(inside, places, 0))
            right = inside & (to_host(tokens[index]) == self._drafted[slots])
            self._covered[slots] += np.cumprod(right, axis=1).sum(axis=1)
        self._drafted[slots] = UNKNOWN

    def _read(self, slots: Ints, lengths: Ints, tokens: Tensor, blocks: NDArray[np.int32]) -> None:
        """For a network that reads tokens: give the rows' first `lengths` tokens their entries."""
        starts = np.maximum(np.minimum(self._covered[slots], lengths - 1), 0)
        self._compute_all(slots, starts, lengths - starts, tokens, blocks, None)
        self._covered[slots] = lengths

    def _compute_all(
        self, slots: Ints, starts: Ints, counts: Ints, tokens: Tensor, blocks: NDArray[np.int32], states: Tensor | None
    ) -> None:
        """Make entries of consecutive positions of rows; states: [sum of counts, width], row after row."""
        begin = 0
        for spans in _spans(slots, starts, counts):
            end = begin + int(spans.counts.sum())
            self._compute(spans, tokens, blocks, None if states is None else states[begin:end])
            begin = end

    def _compute(self, spans: Spans, tokens: Tensor, blocks: NDArray[np.int32], states: Tensor | None) -> None:
        slots, starts, counts = spans.slots, spans.starts, spans.counts
        positions = positions_of(starts, counts)
        owner = slots if positions.size == slots.size else np.repeat(slots, counts)
        token_ids = tokens[self._index(owner), self._index(positions + self._behind)].long()
        batch = self._paging.batch(blocks, slots, starts, counts, token_ids, positions)
        self._states[self._index(slots)] = self._network.forward(batch, states, self._caches)
        self._ready[slots] = starts + counts + self._behind

    def _index(self, numbers: Ints) -> Tensor:
        return to_device(numbers, self._paging.device)


def _without(seen: Observation, early: Ints) -> Observation:
    """The observation without the given number of first positions of each row [rows]."""
    firsts = np.cumsum(seen.counts) - seen.counts + early
    inside = np.flatnonzero(np.arange(seen.counts.sum()) >= np.repeat(firsts, seen.counts))
    hidden = seen.hidden[to_device(inside, seen.hidden.device)]
    return replace(seen, starts=seen.starts + early, counts=seen.counts - early, hidden=hidden)


def _spans(slots: Ints, starts: Ints, counts: Ints) -> list[Spans]:
    if not slots.size:
        return []
    return Spans(np.arange(slots.size), slots, starts, counts).pieces(PIECE_TOKENS)


def _fitting(table: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    missing = width - table.shape[1]
    return table if missing <= 0 else np.pad(table, ((0, 0), (0, missing)), constant_values=UNKNOWN)
