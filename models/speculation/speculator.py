"""Speculation in the worker: asks the proposer for drafts, bounds their number, and learns from the outcome.

For a plan's *speculative* rows (`StepPlan.draft_limits`), the plan gives only the number of positions beyond one that
they may compute. The worker knows where such a row continues. The row first computes its tokens without keys and
values, then its drafts.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.models.batch.host_device import to_device
from troupellm.models.batch.row_drafts import DraftError, RowDrafts, read_drafts
from troupellm.models.batch.row_table import RowTable
from troupellm.models.batch.spans import Spans
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES, AuxHiddenStates
from troupellm.models.proposers.base import Observation, ProposalBatch, Proposer, RowDraws, Sleeper
from troupellm.models.sampling.row_options import RowOptions
from troupellm.models.speculation.draft_length import DraftLength
from troupellm.models.speculation.synthetic_acceptance import ByLot, SyntheticAcceptance, fill_up
from troupellm.models.speculation.verify_batch import Acceptance, Verdict, VerifyBatch
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.protocol.config.speculation import MOST_DRAFTS
from troupellm.protocol.messages.worker import NewRow, StepPlan

Ints = NDArray[np.int64]
NONE = np.zeros(0, dtype=np.bool_)

Options = Callable[[int], RowOptions]
"""Returns a row's options, by its number."""
MakeSpeculator = Callable[[RowTable, Options, GuidedRows | None], "Speculator"]
"""Makes a speculator from a new runner's rows, their options and its guides."""


class Speculator:
    """Asks one proposer for drafts, and keeps count. Calls come from the worker's thread."""

    def __init__(
        self,
        proposer: Proposer,
        rows: RowTable,
        options: Options,
        vocab: int,
        *,
        most: int = MOST_DRAFTS,
        length: DraftLength | None = None,
        synthetic: SyntheticAcceptance | None = None,
        guides: GuidedRows | None = None,
        trees: bool = True,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """
        Args:
            options: of a row, by its number.
            vocab: width of the logits.
            most: drafts of a row in a step.
            length: chooses the number of drafts; None always takes `most`.
            synthetic: keeps drafts at random, for benchmarks: the output is not the model's.
            trees: the attention has masks for them.
            clock: seconds.
        """
        self.proposer, self._rows, self._options, self._vocab = proposer, rows, options, vocab
        self._most, self._length, self._synthetic, self._guides = most, length, synthetic, guides
        self._trees = trees
        self.num_drafts = 0
        """Drafts that the last step verified."""
        self._clock, self._proposing = clock, 0.0
        """And the proposer's seconds in the step under way."""
        self._sleeper = proposer if isinstance(proposer, Sleeper) else None
        self._missed: set[int] = set()
        """Slots passed to `miss` since the last `observe` or the last new row."""
        self._rests, self._left = False, 0
        """The step under way has no drafts, and so many after it, if they are of the same rows."""
        self._resting: Ints | None = None
        """Slots of these."""
        proposer.reset()

    @property
    def most(self) -> int:
        """Drafts of a row in a step."""
        return self._most

    @property
    def watches(self) -> bool:
        """True if the proposer is shown the step under way."""
        return self.proposer.aux_hidden_states.wanted and not (self._rests and self._sleeper is not None)

    @property
    def aux_hidden_states(self) -> AuxHiddenStates:
        """The hidden states that the proposer gets of the step under way."""
        return self.proposer.aux_hidden_states if self.watches else NO_AUX_HIDDEN_STATES

    def add_row(self, new: NewRow) -> None:
        """Called when it is in the table and has options."""
        slot = self._rows.slot(new.row)
        self._missed.clear()
        self.proposer.add_row(slot, new)
        if self._length is not None:
            self._length.add_row(slot)

    def drop_row(self, row: int) -> None:
        """Called while it is still in the table."""
        slot = self._rows.slot(row)
        if not self._rows.pooled[slot]:
            self.proposer.drop_row(slot, self._rows.text(slot))

    def rests(self, plan: StepPlan) -> bool:
        """Begin a step: True if it has no drafts, and the proposer is not shown it. If all of its rows are where the
        host expects them, it is that of an engine without speculation. Called once for a plan, before `begin`.

        Most calls return at once: code that takes three microseconds in a loop takes twenty after matrix products have
        evicted it from the processor's caches.
        """
        slots = self._rows.places(plan)
        if self._left and slots is self._resting:
            self._left -= 1
            return not self.watches
        self.num_drafts, self._resting = 0, slots
        if self._length is not None:
            mixed = max(plan.counts) > 1
            steps = self._length.rests(slots.size, self._clock(), mixed=mixed, left=self._left)
            self._rests, self._left = steps > 0, max(0, steps - 1)
        if self.watches or not self._rests:
            self._missed.clear()
        else:
            self._miss(slots, np.array(plan.starts, dtype=np.int64))
        return self._rests and not self.watches

    def passes(self, slots: Ints, starts: Ints, ends: Ints) -> bool:
        """True if the step under way rests, and its rows are where the host expects them: nothing more is to be done.

        Args:
            slots, starts, ends: of the plan's rows.
        """
        return self._rests and not self.watches and self._as_planned(slots, starts, ends, self._rows.lengths[slots])

    def begin(self, plan: StepPlan, slots: Ints, starts: Ints, counts: Ints) -> VerifyBatch:
        """Decide which positions each row computes, and write its drafts behind its tokens.

        Args:
            slots, starts, counts: of the plan's rows; the latter are the host's.
        """
        self._proposing = 0.0
        lengths = self._rows.lengths[slots]
        if self._rests and self._as_planned(slots, starts, starts + counts, lengths):
            return VerifyBatch(Spans(np.arange(slots.size), slots, starts, counts), NONE, lengths)
        limits = np.array(plan.draft_limits, dtype=np.int64) if plan.draft_limits else np.full(slots.size, -1)
        speculative = limits >= 0
        starts = np.where(speculative, np.maximum(starts, self._rows.computed[slots]), starts)
        room = np.minimum(self._rows.capacity(slots), self._rows.longest - 1)
        most = np.where(speculative, np.minimum(1 + limits, room - starts), counts)
        counts = np.where(speculative, np.minimum(lengths - starts, most), counts)
        # Behind the last draft a token is drawn, too.
        wanted = np.minimum(np.minimum(most - counts, self._rows.longest - 1 - lengths), self._most)
        wanted = np.where(speculative & (starts + counts == lengths), wanted, 0)
        found = self._propose(plan, slots, lengths, wanted) if not self._rests and (wanted > 0).any() else {}
        for index, drafts in found.items():
            counts[index] += len(drafts)
        self.num_drafts = sum(map(len, found.values()))
        kept = np.flatnonzero(counts > 0)
        place = {index: number for number, index in enumerate(kept.tolist())}
        return VerifyBatch(
            Spans(kept, slots[kept], starts[kept], counts[kept]),
            speculative[kept],
            lengths[kept],
            {place[index]: drafts for index, drafts in found.items()},
        )

    def _as_planned(self, slots: Ints, starts: Ints, ends: Ints, lengths: Ints) -> bool:
        """True if every row computes the positions that the host expects, up to its last token."""
        if ends.tobytes() != lengths.tobytes():  # of a few numbers: sooner than by comparing them
            return False
        computed = self._rows.computed[slots]
        return computed.tobytes() == starts.tobytes() or bool((computed <= starts).all())

    def acceptance(self, plan: StepPlan, verify_batch: VerifyBatch) -> Acceptance:
        """The rule by which a step's drafts are accepted."""
        if self._synthetic is None:
            return Acceptance()
        return ByLot(self._synthetic, self._options, plan.rows, verify_batch)

    def finish_plain(self, verify_batch: VerifyBatch) -> None:
        """A step without drafts is done: its tokens are appended."""
        spans = verify_batch.spans
        self._rows.computed[spans.slots] = spans.starts + spans.counts

    def finish(self, verify_batch: VerifyBatch, verdict: dict[int, Verdict]) -> None:
        """Append the kept tokens of each row.

        Args:
            verdict: of the rows of `verify_batch.spans` that sample.
        """
        spans, rows = verify_batch.spans, self._rows
        drafted, accepted = verify_batch.draft_counts(), np.zeros(spans.slots.size, dtype=np.int64)
        slots: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        grown = np.zeros(spans.slots.size, dtype=np.int64)
        for row, kept in verdict.items():
            # A failed row may be in the next plan already, so what it holds must be a token id.
            said = kept.tokens or [0]
            slot, length = int(spans.slots[row]), int(verify_batch.lengths[row])
            slots += [slot] * len(said)
            positions += range(length, length + len(said))
            tokens += said
            accepted[row], grown[row] = kept.accepted, len(said)
        if tokens:
            rows.put(slots, positions, tokens)
        rows.lengths[spans.slots] = verify_batch.lengths + grown
        # The last token of a row is computed together with the next one.
        ends = spans.starts + spans.counts - drafted + accepted
        rows.computed[spans.slots] = np.where(grown > 0, np.minimum(ends, rows.lengths[spans.slots] - 1), ends)

    def learn(self, verify_batch: VerifyBatch, verdict: dict[int, Verdict], aux: Sequence[Tensor]) -> None:
        """Show the proposer the computed and kept tokens, and keep count.

        Args:
            verdict: as for `finish`; of a step without drafts nothing.
            aux: the states of the step's tokens, piece by piece; empty if none are shown.
        """
        if self.watches:
            self._observe(verify_batch, verdict, aux)
        if self._length is None or self._rests:
            return
        speculative, spans = np.flatnonzero(verify_batch.speculative), verify_batch.spans
        if not speculative.size:
            return
        accepted = np.zeros(spans.slots.size, dtype=np.int64)
        for row, kept in verdict.items():
            accepted[row] = kept.accepted
        drafted = verify_batch.draft_counts()
        self._length.learn(spans.slots[speculative], drafted[speculative], accepted[speculative], self._proposing)

    def _miss(self, slots: Ints, starts: Ints) -> None:
        """Tell a proposer that it is not shown this step, once for as long as it goes on with the same rows."""
        if self._sleeper is not None and not self._missed.issuperset(slots.tolist()):
            self._missed.update(slots.tolist())
            writing = self._rows.pooled[slots] == 0  # it knows of no others
            self._sleeper.miss(slots[writing], np.maximum(starts, self._rows.computed[slots])[writing])

    def _observe(self, verify_batch: VerifyBatch, verdict: dict[int, Verdict], aux: Sequence[Tensor]) -> None:
        spans = verify_batch.spans
        writing, own = self._rows.pooled[spans.slots] == 0, spans.counts - verify_batch.draft_counts()
        counts = own.copy()
        for row, kept in verdict.items():
            writing[row] &= bool(kept.tokens)
            counts[row] += len(kept.path)
        rows = np.flatnonzero(writing)
        if not rows.size:
            return
        firsts, counts = (np.cumsum(spans.counts) - spans.counts)[rows], counts[rows]
        ends = np.cumsum(counts)
        index = np.arange(ends[-1]) + np.repeat(firsts - ends + counts, counts)
        if verify_batch.trees:  # the kept drafts of a tree need not be contiguous
            for place, row in enumerate(rows.tolist()):
                path = verdict[row].path if row in verdict else []
                index[ends[place] - len(path) : ends[place]] = firsts[place] + own[row] + np.array(path, dtype=np.int64)
        hidden = torch.empty(index.size, 0, dtype=torch.float32)
        if aux:
            states = aux[0] if len(aux) == 1 else torch.cat(tuple(aux))
            hidden = states[to_device(index, states.device)]
        self._rows.settle()
        self.proposer.observe(
            Observation(
                slots=spans.slots[rows],
                starts=spans.starts[rows],
                counts=counts,
                hidden=hidden,
                tokens=self._rows.tokens,
                blocks=self._rows.blocks,
            )
        )

    def _propose(self, plan: StepPlan, slots: Ints, lengths: Ints, wanted: Ints) -> dict[int, RowDrafts]:
        """Drafts by index in the plan; they are also written to the table."""
        limits = wanted
        if self._length is not None:
            asked = np.flatnonzero(wanted > 0)
            limits = np.zeros_like(wanted)
            limits[asked] = np.minimum(self._length.limits(slots[asked], len(plan.rows), wanted[asked]), wanted[asked])
        asked = np.flatnonzero(limits > 0)
        if not asked.size:
            return {}
        began = self._clock()
        self._rows.settle()
        rows = [plan.rows[index] for index in asked.tolist()]
        drafts = self.proposer.propose(
            ProposalBatch(
                slots=slots[asked],
                lengths=lengths[asked],
                limits=limits[asked],
                tokens=self._rows.tokens,
                blocks=self._rows.blocks,
                draws=self._draws(rows),
            )
        )
        found = {}
        given = read_drafts(drafts, limits[asked].tolist(), self._vocab)
        for index, row, drafted in zip(asked.tolist(), rows, given, strict=True):
            if drafted.parents is not None and not self._trees:
                raise DraftError(
                    "trees of drafts over latent attention are verified on the device cpu only, and over attention in "
                    "chunks nowhere: propose chains"
                )
            if self._synthetic is not None:
                fill_up(drafted, int(limits[index]))
            if self._guides is not None:
                self._guides.trim(row, drafted)
            if len(drafted):
                found[index] = drafted
        self._place(found, slots, lengths)
        self._proposing = self._clock() - began
        return found

    def _draws(self, rows: Sequence[int]) -> RowDraws:
        options = [self._options(row) for row in rows]
        device = self._rows.tokens.device
        return RowDraws(
            to_device(torch.tensor([each.stream for each in options], dtype=torch.int64), device),
            to_device(torch.tensor([each.inverse_temperature for each in options], dtype=torch.float32), device),
            all(each.inverse_temperature == 0 for each in options),
        )

    def _place(self, found: dict[int, RowDrafts], slots: Ints, lengths: Ints) -> None:
        """Write the drafts where the step reads its token ids."""
        at: list[int] = []
        positions: list[int] = []
        tokens: list[int] = []
        for index, drafts in found.items():
            length = int(lengths[index])
            at += [int(slots[index])] * len(drafts)
            positions += range(length, length + len(drafts))
            tokens += drafts.tokens
        if tokens:
            self._rows.put(at, positions, tokens)
