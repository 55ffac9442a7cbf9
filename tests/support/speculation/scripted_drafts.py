"""A proposer that knows what the model will say, and is wrong as often as it is told to be; and a host for speculative
rows."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupellm.models.batch.row_drafts import ROOT, Drafts
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES, AuxHiddenStates
from troupellm.models.proposers.base import Observation, ProposalBatch
from troupellm.models.runner.runner import ModelRunner
from troupellm.protocol.messages.worker import AdapterSlot, NewRow, RowChange, SamplingState, StepPlan, StepResult

MODULE = __name__
"""For settings that name classes of this module."""

Key = tuple[tuple[int, ...], int, int]
"""Prompt, seed and fork of a row."""


class ScriptedProposer:
    """Of known rows; of others it guesses."""

    def __init__(
        self,
        truth: Mapping[Key, Sequence[int]],
        vocab: int,
        *,
        right: float = 0.7,
        branches: int = 1,
        seed: int = 0,
        aux_hidden_states: AuxHiddenStates = NO_AUX_HIDDEN_STATES,
    ) -> None:
        """
        Args:
            truth: what follows the prompt of a row.
            right: how often a draft is.
            branches: drafts behind each one, of which one at most is right; 1 makes chains.
        """
        self.aux_hidden_states, self._truth, self._vocab, self._right, self._branches = (
            aux_hidden_states,
            truth,
            vocab,
            right,
            branches,
        )
        self._random = random.Random(seed)
        self._rows: dict[int, list[int]] = {}
        self.observed: dict[int, list[tuple[int, int]]] = {}
        """By slot, spans of positions that were shown."""
        self.sums: dict[int, dict[int, float]] = {}
        """By slot and position, what was shown of it."""
        self.dropped: list[list[int]] = []

    def add_row(self, slot: int, new: NewRow) -> None:
        known = np.frombuffer(new.token_ids, dtype="<i4").tolist()
        prompt = tuple(known[: new.num_prompt_tokens])
        text = self._truth.get((prompt, new.sampling.seed, new.sampling.fork), ())
        self._rows[slot] = [*prompt, *text]
        self.observed[slot], self.sums[slot] = [], {}

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        self.dropped.append(token_ids.tolist())
        del self._rows[slot]

    def observe(self, seen: Observation) -> None:
        sums, place = seen.hidden.sum(dim=1).tolist(), 0
        for slot, start, count in zip(seen.slots.tolist(), seen.starts.tolist(), seen.counts.tolist(), strict=True):
            self.observed[slot].append((start, count))
            self.sums[slot] |= dict(zip(range(start, start + count), sums[place : place + count], strict=True))
            place += count

    def reset(self) -> None:
        self._rows.clear()

    def propose(self, batch: ProposalBatch) -> Drafts:
        width = int(batch.limits.max())
        tokens, parents = np.zeros((2, batch.slots.size, width), dtype=np.int32)
        counts = np.zeros(batch.slots.size, dtype=np.int64)
        for row, (slot, length, limit) in enumerate(
            zip(batch.slots.tolist(), batch.lengths.tolist(), batch.limits.tolist(), strict=True)
        ):
            drafts = self._drafts(self._rows[slot][length:], self._random.randint(0, limit))
            counts[row] = len(drafts)
            for index, (token, parent) in enumerate(drafts):
                tokens[row, index], parents[row, index] = token, parent
        return Drafts(tokens, counts, parents if self._branches > 1 else None)

    def _drafts(self, text: list[int], most: int) -> list[tuple[int, int]]:
        """Tokens and parents."""
        found: list[tuple[int, int]] = []
        node, depth = ROOT, 0
        while len(found) < most:
            true = text[depth] if depth < len(text) else self._random.randrange(self._vocab)
            wrong = [token for token in self._random.sample(range(self._vocab), self._branches + 1) if token != true]
            siblings = wrong[: min(self._branches, most - len(found))]
            place = self._random.randrange(len(siblings))
            if self._random.random() < self._right:
                siblings[place] = true
            found += [(token, node) for token in siblings]
            node, depth = len(found) - len(siblings) + place, depth + 1
        return found


class Forgetful:
    """Keeps nothing of rows."""

    aux_hidden_states = NO_AUX_HIDDEN_STATES

    def add_row(self, slot: int, new: Any) -> None:
        pass

    def drop_row(self, slot: int, token_ids: Any) -> None:
        pass

    def observe(self, seen: Any) -> None:
        pass

    def reset(self) -> None:
        pass


class Guessing(Forgetful):
    """Drafts that repeat what the row, or chance, says: as chains, or as trees with branches."""

    def __init__(self, config: Any, context: Any) -> None:
        self._vocab = context.decoder.config.vocab_size
        self._random = random.Random(3)
        self._branches = 1

    def propose(self, batch: ProposalBatch) -> Drafts:
        width = int(batch.limits.max())
        tokens, parents = np.zeros((2, batch.slots.size, width), dtype=np.int32)
        counts = np.zeros(batch.slots.size, dtype=np.int64)
        for row, (slot, length) in enumerate(zip(batch.slots.tolist(), batch.lengths.tolist(), strict=True)):
            known = batch.tokens[slot, :length].tolist()
            counts[row] = self._random.randint(0, int(batch.limits[row]))
            taken: set[tuple[int, int]] = set()
            for index in range(int(counts[row])):
                parent = self._parent(index)
                token = self._token(known)
                while (parent, token) in taken:
                    token = self._random.randrange(self._vocab)
                taken.add((parent, token))
                tokens[row, index], parents[row, index] = token, parent
        return Drafts(tokens, counts, parents)

    def _parent(self, index: int) -> int:
        return index - 1

    def _token(self, known: Sequence[int]) -> int:
        return self._random.choice([known[-1], self._random.choice(known), self._random.choice((65, 66, 97, 99))])


class GuessingTrees(Guessing):
    def _parent(self, index: int) -> int:
        return self._random.randint(ROOT, index - 1)


class Failing(Guessing):
    """Fails at its fifth proposal: raises."""

    def propose(self, batch: ProposalBatch) -> Drafts:
        self._left = getattr(self, "_left", 5) - 1
        return super().propose(batch) if self._left else self._fail(batch)

    def _fail(self, batch: ProposalBatch) -> Drafts:
        raise RuntimeError("out of ideas")


class TooMany(Failing):
    """The same: drafts more than it was asked for."""

    def _fail(self, batch: ProposalBatch) -> Drafts:
        width = int(batch.limits.max()) + 1
        return Drafts(np.zeros((batch.slots.size, width), np.int32), np.full(batch.slots.size, width))


class Fractions(Failing):
    """The same: drafts what looks like tokens."""

    def _fail(self, batch: ProposalBatch) -> Drafts:
        return Drafts(np.full((batch.slots.size, 1), 32.0), np.ones(batch.slots.size, np.int64))


class Blind(Guessing):
    """Fails when it is shown what was computed."""

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.aux_hidden_states = AuxHiddenStates(last=True)

    def observe(self, seen: Any) -> None:
        raise RuntimeError("nothing to be seen")


@dataclass
class SpeculativeHost:
    """Plans rows for a runner as a scheduler does that is one step behind: starts and lengths are those of the step
    before the last."""

    runner: ModelRunner
    limit: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompts: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[int, bytes, bytes]]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    slots: tuple[AdapterSlot, ...] = ()
    """For the next step."""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(self.runner.cache.num_blocks - 1))  # the last one is a GPU runner's own
        self._done: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._new: list[NewRow] = []

    def add(self, row: int, prompt: Sequence[int], adapter: int = 0, **sampling: Any) -> None:
        groups = self.runner.rows.num_groups
        per_row = self.runner.rows.blocks.shape[2]
        blocks = tuple(tuple(self._free.pop() for _ in range(per_row)) for _ in range(groups))
        ids = np.array(prompt, dtype="<i4").tobytes()
        state = SamplingState(**{"temperature": 0.0, **sampling})
        self._new.append(
            NewRow(
                row=row,
                epoch=0,
                request_id=str(row),
                token_ids=ids,
                num_prompt_tokens=len(prompt),
                sampling=state,
                blocks=blocks,
                adapter=adapter,
            )
        )
        self.tokens[row], self.prompts[row], self._done[row] = list(prompt), len(prompt), 0

    def step(self, chunk: int = 1000, changes: tuple[RowChange, ...] = ()) -> StepResult:
        """All rows that have not ended; prompts go by chunks."""
        rows = tuple(row for row in self.tokens if row not in self.errors and row not in self.finished)
        starts, counts, limits = [], [], []
        for row in rows:
            prompt, done = self.prompts[row], self._done[row]
            speculative = done >= prompt
            starts.append(self._seen.get(row, prompt) if speculative else done)
            counts.append(1 if speculative else min(chunk, prompt - done))
            limits.append(self.limit if speculative else -1)
            self._done[row] += counts[-1]
            self._seen[row] = len(self.tokens[row]) - 1 if speculative else prompt
        plan = StepPlan(
            step=self.steps,
            engine_epoch=0,
            rows=rows,
            epochs=(0,) * len(rows),
            starts=tuple(starts),
            counts=tuple(counts),
            draft_limits=tuple(limits),
            new_rows=tuple(self._new),
            changes=changes,
            adapters=self.slots,
        )
        self._new, self.slots, self.steps = [], (), self.steps + 1
        result = self.runner.run(plan)
        failed = {error.row for error in result.errors}
        said = zip(rows, limits, result.token_counts, result.accepted or (0,) * len(rows), strict=True)
        for row, limit, count, accepted in said:
            fine = count == 1 + accepted or count == accepted == 0
            assert limit < 0 or row in failed or fine, "a scheduler takes this for a worker's fault"
        given = iter(result.tokens)
        for row, count in zip(rows, result.token_counts, strict=True):
            self.tokens[row] += [next(given) for _ in range(count)]
        self.drafted, self.accepted = self.drafted + sum(result.drafted), self.accepted + sum(result.accepted)
        self.errors |= {error.row: error.message for error in result.errors}
        self.finished |= set(result.finished)
        for entry in result.logprobs:
            width, ids = entry.width, np.frombuffer(entry.token_ids, "<i4")
            for place in range(ids.size // width):
                part = slice(4 * width * place, 4 * width * (place + 1))
                place_of = (entry.position + place, entry.token_ids[part], entry.logprobs[part])
                self.logprobs.setdefault(entry.row, []).append(place_of)
        return result

    def run(self, tokens: int, chunk: int = 1000) -> dict[int, list[int]]:
        """Until every row has so many generated tokens, or has ended; what they generated."""
        while any(
            len(text) < self.prompts[row] + tokens and row not in self.errors and row not in self.finished
            for row, text in self.tokens.items()
        ):
            self.step(chunk)
        return {row: text[self.prompts[row] :][:tokens] for row, text in self.tokens.items()}
