"""The worker's knowledge of each row between steps: tokens, length, epoch and block table.

Tokens lie on the device, so that a sampled token can be read by the next step before the host has seen it; numbers
lie on the host, since they follow from the plans alone. A row has one slot in all of them, for as long as it is known.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.fused_decoder.step import RowMemory
from troupellm.protocol.messages.media import MediaSpan
from troupellm.protocol.messages.worker import NULL_BLOCK, NewRow, RowFork, SamplingState, StepPlan

FIRST_SLOTS = 16


class PlanError(RuntimeError):
    """A plan contradicts the worker's knowledge of its rows: a fault of the scheduler."""


class RowTable:
    """Rows by slot.

    Attributes:
        num_groups: cache groups.
        tokens: int32 [slots, max_model_len + 1] on the device.
        lengths: int64 [slots], tokens known per row, sampled ones included.
        blocks: int32 [groups, slots, blocks per row]; NULL_BLOCK where a row has none any more.
        num_blocks: int64 [groups, slots], filled entries of `blocks`.
        prompt_logprobs: int64 [slots], from the sampling state; -1 is none.
        num_prompt_tokens: int64 [slots].
        pooled: int64 [slots], 1 for rows that end with their prompt and sample nothing.
        computed: int64 [slots], first positions whose keys and values are there; kept by the verification of drafts.
        adapters: int64 [slots], the adapter slot of each row; 0 is the base model.
        states: int64 [slots], the state slot of each row, where the model has states.
        adapted: number of known rows with an adapter.
        embeddings: by slot, what stands for the prompt instead of tokens, float32 [prompt, hidden]; few rows have any.
        media: by slot, positions of the prompt with embeddings of images, until the row has come behind them.
    """

    def __init__(self, *, max_model_len: int, block_size: int, num_groups: int = 1, slots: int = FIRST_SLOTS) -> None:
        self._first_slots = slots
        self.longest, self._block_size, self.num_groups = max_model_len, block_size, num_groups
        self._slots: dict[int, int] = {}
        self._last: tuple[tuple[int, ...], tuple[int, ...], NDArray[np.int64]] | None = None
        """Rows of the last plan, their epochs and where they lie: while no row joins or leaves, the next plan names
        the same."""
        self._memory: RowMemory | None = None
        self._prompt_logprobs: set[int] = set()
        self._unusual: set[int] = set()
        """Slots of rows with embeddings, with a guide, or to be pooled."""
        self._free: list[int] = []
        self.embeddings: dict[int, Tensor] = {}
        self.media: dict[int, tuple[MediaSpan, ...]] = {}
        self.adapted = 0
        self.tokens = torch.empty(0, max_model_len + 1, dtype=torch.int32)
        self.blocks: NDArray[np.int32] = np.zeros((num_groups, 0, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros((num_groups, 0), dtype=np.int64)
        self.lengths, self.epochs, self.prompt_logprobs, self.num_prompt_tokens, self.pooled = (
            np.zeros(0, dtype=np.int64) for _ in range(5)
        )
        self.computed, self.adapters, self.states = (np.zeros(0, dtype=np.int64) for _ in range(3))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, row: int) -> bool:
        return row in self._slots

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if any row asks for log-probabilities of its prompt."""
        return bool(self._prompt_logprobs)

    @property
    def unusual(self) -> bool:
        """True if any row has input embeddings, a guide or prompt log-probabilities, or is to be pooled."""
        return bool(self._unusual or self._prompt_logprobs or self.media)

    @property
    def has_inputs(self) -> bool:
        """True if any row has input embeddings, its own or those of images."""
        return bool(self.embeddings or self.media)

    def add(self, new: NewRow) -> NDArray[np.int32]:
        """Make a row known, or replace an older epoch of it.

        Returns:
            its tokens, int32 [known].
        """
        known = np.frombuffer(new.token_ids, dtype="<i4")
        if not 0 < known.size <= self.longest:
            raise PlanError(f"row {new.row}: {known.size} tokens, the context holds {self.longest}")
        slot, self._last = self._slots.get(new.row), None
        if slot is None:
            slot = self._slots[new.row] = self._take_slot()
        elif new.epoch <= self.epochs[slot]:
            raise PlanError(f"row {new.row}: epoch {new.epoch} is not newer than {self.epochs[slot]}")
        self._write(slot, 0, known.astype(np.int32))
        self.lengths[slot], self.epochs[slot] = known.size, new.epoch
        self.num_blocks[:, slot] = 0
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.pooled[slot] = new.pooling is not None
        self.computed[slot] = 0
        self.states[slot] = new.state
        self._set_adapter(slot, new.adapter)
        self.embeddings.pop(slot, None)
        if new.embeddings is not None:
            given = np.frombuffer(new.embeddings, dtype="<f4").reshape(new.num_prompt_tokens, -1)
            self.embeddings[slot] = torch.from_numpy(given.copy())
        self.media.pop(slot, None)
        if new.media:
            self.media[slot] = new.media
        if new.embeddings is not None or new.pooling is not None or new.sampling.guide is not None:
            self._unusual.add(slot)
        else:
            self._unusual.discard(slot)
        self.set_sampling(new.row, new.sampling)
        self.append_blocks(new.row, new.blocks)
        return known

    def drop(self, row: int) -> None:
        """Forget a row; one that is not known is fine."""
        slot, self._last = self._slots.pop(row, None), None
        if slot is not None:
            self.embeddings.pop(slot, None)
            self.media.pop(slot, None)
            self._set_adapter(slot, 0)
            self._prompt_logprobs.discard(slot)
            self._unusual.discard(slot)
            self._free.append(slot)

    def pass_media(self, plan: StepPlan) -> None:
        """Forget the images of rows that the plan computes behind them."""
        for row, start in zip(plan.rows, plan.starts, strict=True):
            spans = self.media.get(slot) if (slot := self._slots.get(row)) is not None else None
            if slot is not None and spans and start >= spans[-1].end:
                del self.media[slot]

    def append_blocks(self, row: int, groups: Sequence[Sequence[int]]) -> None:
        """Add blocks at the end of a row's tables."""
        if not groups:
            return
        if len(groups) != self.num_groups:
            raise PlanError(f"row {row}: blocks of {len(groups)} cache groups, this worker has {self.num_groups}")
        slot = self.slot(row)
        for group, blocks in enumerate(groups):
            begin = int(self.num_blocks[group, slot])
            end = begin + len(blocks)
            if end > self.blocks.shape[2]:
                raise PlanError(f"row {row}: {end} blocks, the context needs {self.blocks.shape[2]} at most")
            self.blocks[group, slot, begin:end] = blocks
            self.num_blocks[group, slot] = end

    def drop_blocks(self, row: int, count: int) -> None:
        """Take blocks off the end of a row's tables."""
        slot = self.slot(row)
        held = int(self.num_blocks[:, slot].min())
        if not 0 <= count <= held:
            raise PlanError(f"row {row}: {count} of {held} blocks cannot be dropped")
        self.num_blocks[:, slot] -= count

    def fork(self, forks: Sequence[RowFork]) -> None:
        """Let rows go on from others; every parent is read before any row is written.

        Raises:
            PlanError: an unknown row, or more tokens than the parent has.
        """
        slots, parents = (
            np.array([self.slot(row) for row in rows], dtype=np.int64)
            for rows in ([fork.row for fork in forks], [fork.parent for fork in forks])
        )
        kept = np.array([fork.num_tokens for fork in forks], dtype=np.int64)
        wrong = (kept < 1) | (kept > self.lengths[parents])
        if wrong.any():
            fork = forks[int(wrong.argmax())]
            raise PlanError(f"row {fork.row}: {fork.num_tokens} tokens of row {fork.parent}, which has fewer")
        self._copy_tokens(slots, parents, kept, np.array([fork.token_id for fork in forks], dtype=np.int64))
        self.lengths[slots] = kept + 1
        self.computed[slots] = 0
        self._copy_tables(slots, parents)

    def set_sampling(self, row: int, sampling: SamplingState) -> None:
        """Remember the parts of a row's sampling state that this table needs."""
        slot = self.slot(row)
        self.prompt_logprobs[slot] = sampling.prompt_logprobs
        if sampling.prompt_logprobs >= 0:
            self._prompt_logprobs.add(slot)
        else:
            self._prompt_logprobs.discard(slot)

    def slot(self, row: int) -> int:
        """The slot of a row."""
        slot = self._slots.get(row)
        if slot is None:
            raise PlanError(f"row {row} is not known")
        return slot

    def slots_of(self, plan: StepPlan, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Slots of a plan's rows [rows], after checking the plan against the table. They must not be changed.

        Args:
            starts: the plan's.
            counts: the plan's.

        Raises:
            PlanError: an unknown row, another epoch, positions beyond the known tokens or the row's blocks.
        """
        slots, ends = self.places(plan), starts + counts
        most = np.minimum(self.lengths[slots], self.capacity(slots))
        if ((counts < 1) | (ends > most)).any():
            wrong = (
                ("count of tokens", counts < 1),
                ("span beyond its tokens", ends > self.lengths[slots]),
                ("span beyond its blocks", ends > self.capacity(slots)),
            )
            what, where = next((what, where) for what, where in wrong if where.any())
            raise PlanError(f"row {plan.rows[int(where.argmax())]}: wrong {what} in step {plan.step}")
        return slots

    def places(self, plan: StepPlan) -> NDArray[np.int64]:
        """Slots of a plan's rows [rows], not to be changed; the same array for as long as plans name the same rows.

        Raises:
            PlanError: an unknown row, another epoch.
        """
        if self._last is None or self._last[0] != plan.rows or self._last[1] != plan.epochs:
            slots = np.array([self.slot(row) for row in plan.rows], dtype=np.int64)
            other = self.epochs[slots] != plan.epochs
            if other.any():
                raise PlanError(f"row {plan.rows[int(other.argmax())]}: wrong epoch in step {plan.step}")
            self._last = plan.rows, plan.epochs, slots
        return self._last[2]

    @property
    def memory(self) -> RowMemory:
        """The memory of tokens and blocks, on a CPU; the same object until more slots are needed."""
        if self._memory is None:
            self._memory = RowMemory(self.tokens.numpy(), self.lengths, self.blocks, self.num_blocks)
        return self._memory

    def append(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Add one token to each of the rows. tokens: int64 [rows], on the device; -1 of a failed row.

        A failed row may be in the next plan already, so what it holds must be a token id.
        """
        self.tokens.numpy()[slots, self.lengths[slots]] = np.maximum(tokens.numpy(), 0)
        self.lengths[slots] += 1

    def tokens_at(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """The tokens [n] of some slots at some positions [n], int64."""
        return torch.from_numpy(self.tokens.numpy()[slots, positions].astype(np.int64))

    def append_known(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens to one row that were not sampled, such as those that a guide forces."""
        slot = self.slot(row)
        begin, end = int(self.lengths[slot]), int(self.lengths[slot]) + len(tokens)
        self._write(slot, begin, np.array(tokens, dtype=np.int32))
        self.lengths[slot] = end

    def put(self, slots: Sequence[int], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """Write tokens [n] at positions [n] of slots [n]; `lengths` says how many of them belong to the rows."""
        self.tokens.numpy()[slots, positions] = tokens

    def settle(self) -> None:
        """Make `tokens` complete for every later read; a GPU's table may have writes outstanding."""

    def text(self, slot: int) -> NDArray[np.int32]:
        """The tokens of a row, a view."""
        found: NDArray[np.int32] = self.tokens.numpy()[slot, : self.lengths[slot]]
        return found

    def capacity(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of positions [rows] that the blocks of some slots hold."""
        held: NDArray[np.int64] = self.num_blocks[:, slots].min(axis=0) * self._block_size
        return held

    def room(self, slots: NDArray[np.int64]) -> list[int]:
        """The number of tokens that each of the rows may still get."""
        left: list[int] = (self.longest - self.lengths[slots]).tolist()
        return left

    def tables(self, row: int) -> list[list[int]]:
        """The blocks of a row, per group; NULL_BLOCK where it has none any more."""
        slot = self.slot(row)
        counts = self.num_blocks[:, slot].tolist()
        return [table[:count].tolist() for table, count in zip(self.blocks[:, slot], counts, strict=True)]

    def held_blocks(self) -> set[int]:
        """The blocks of all rows."""
        return {block for row in self._slots for table in self.tables(row) for block in table} - {NULL_BLOCK}

    def poison_free_slots(self, token: int) -> None:
        """For debugging: overwrite the tokens of forgotten rows with `token`."""
        self.tokens[self._free] = token

    def _write(self, slot: int, begin: int, tokens: NDArray[np.int32]) -> None:
        """Known tokens, from position `begin` on."""
        self.tokens.numpy()[slot, begin : begin + tokens.size] = tokens

    def _copy_tokens(
        self, slots: NDArray[np.int64], parents: NDArray[np.int64], kept: NDArray[np.int64], chosen: NDArray[np.int64]
    ) -> None:
        """Each slot gets the first tokens of its parent, and one behind them."""
        here, longest = torch.from_numpy(slots), int(kept.max())
        self.tokens[here, :longest] = self.tokens[torch.from_numpy(parents), :longest]
        self.tokens[here, torch.from_numpy(kept)] = torch.from_numpy(chosen).to(torch.int32)

    def _copy_tables(self, slots: NDArray[np.int64], parents: NDArray[np.int64]) -> None:
        self.blocks[:, slots], self.num_blocks[:, slots] = self.blocks[:, parents], self.num_blocks[:, parents]

    def _set_adapter(self, slot: int, adapter: int) -> None:
        self.adapted += (adapter > 0) - int(self.adapters[slot] > 0)
        self.adapters[slot] = adapter

    def _take_slot(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        old = self.lengths.size
        new = max(self._first_slots, 2 * old)
        self._free = list(range(new - 1, old - 1, -1))
        self._resize(old, new)
        groups, _, width = self.blocks.shape
        self.blocks = np.concatenate((self.blocks, np.zeros((groups, new - old, width), dtype=np.int32)), axis=1)
        self.num_blocks = np.concatenate((self.num_blocks, np.zeros((groups, new - old), dtype=np.int64)), axis=1)
        for name in (
            "lengths",
            "epochs",
            "prompt_logprobs",
            "num_prompt_tokens",
            "pooled",
            "computed",
            "adapters",
            "states",
        ):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(new - old, dtype=np.int64))))
        self._memory = None

    def _resize(self, old: int, new: int) -> None:
        """Make room for the tokens of this many slots."""
        grown = torch.empty(new, self.tokens.shape[1], dtype=torch.int32)
        grown[:old] = self.tokens
        self.tokens = grown
