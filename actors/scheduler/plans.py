"""Plans: as they are drawn up, and those that were given away and have not come back."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.worker import NewRow, RowChange, RowError, SamplingState, StepPlan


class BrokenResult(RuntimeError):
    """The worker's answer has the wrong shape or order: a worker fault, for a supervisor."""


class PlanInFlight:
    """The scheduler's record of one plan. The lists are parallel and in the plan's order."""

    __slots__ = (
        "clean",
        "counts",
        "decode_tokens",
        "epochs",
        "expected",
        "has_beams",
        "limits",
        "planned_at",
        "prefill_tokens",
        "prefills",
        "rows",
        "samplers",
        "sequences",
        "step",
    )

    def __init__(self, step: int, planned_at: float) -> None:
        self.step = step
        self.planned_at = planned_at
        self.sequences: list[Sequence] = []
        self.rows: tuple[int, ...] = ()
        self.epochs: tuple[int, ...] = ()
        self.counts: tuple[int, ...] = ()
        """Positions per row, drafts aside."""
        self.expected: tuple[int, ...] = ()
        """Tokens per row that must come back (at least): 1 where the span reaches the last known token, else 0."""
        self.limits: tuple[int, ...] = ()
        """As in `StepPlan`; empty where no row is speculative."""
        self.samplers: list[Sequence] = []
        """The sequences with 1 in `expected`."""
        self.prefills: list[tuple[Sequence, int, int, bool]] = []
        """(sequence, epoch, tokens, whether it samples) of the rows that are not plain decodes."""
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.has_beams = False
        """Some of the sequences are beams."""
        self.clean = True
        """No sequence of the plan has ended or was preempted since, or has tokens to compute that its guide forced."""


class Aligned(msgspec.Struct, frozen=True):
    """A result's columns for its plan's rows, in the plan's order."""

    token_counts: tuple[int, ...]
    tokens: tuple[int, ...]
    errors: dict[int, RowError]
    """By index in the plan."""
    finished: frozenset[int] = frozenset()
    """Rows whose guide is complete."""
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    """Per row; both are empty where nothing was drafted."""


class PlansInFlight:
    """In order of their steps."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_returned = -1
        self._in_flight: deque[PlanInFlight] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[PlanInFlight]:
        return iter(self._in_flight)

    @property
    def full(self) -> bool:
        return len(self._in_flight) >= self.capacity

    def launch(self, launched: PlanInFlight) -> None:
        self._in_flight.append(launched)

    def find(self, step: int) -> PlanInFlight | None:
        """The oldest flight if it is this step's; None for a step that is not in flight.

        Raises:
            BrokenResult: the step overtook an earlier one.
        """
        if self._in_flight and self._in_flight[0].step == step:
            return self._in_flight[0]
        if any(launched.step == step for launched in self._in_flight):
            raise BrokenResult(f"the result of step {step} overtook that of an earlier step")
        return None

    def land(self, launched: PlanInFlight) -> None:
        """Its result is here: the oldest one has come back.

        Raises:
            BrokenResult: it is not the oldest one.
        """
        if self._in_flight[0] is not launched:
            raise BrokenResult(f"the result of step {launched.step} overtook that of an earlier step")
        self.last_returned = launched.step
        self._in_flight.popleft()

    def forget(self) -> None:
        """None of them will come back."""
        if self._in_flight:
            self.last_returned = self._in_flight[-1].step
            self._in_flight.clear()

    def disturb(self) -> None:
        """A sequence has ended or was preempted: what is in flight must be read row by row."""
        for launched in self._in_flight:
            launched.clean = False


PLAIN: Final = -1
"""Draft limit of a row that computes just its span."""
MOST_NEW_BYTES: Final = 16 * 2**20
"""Of new rows in one plan, which is one frame to a worker process and must fit it: others begin in the next one."""
_ID_BYTES = 5
"""Of a token id in a frame, at most."""


class StepPlanBuilder:
    """Parallel lists."""

    __slots__ = (
        "_has_limits", "budget", "changes", "counts", "expected", "launched", "limits", "new_bytes", "new_rows",
        "plain", "sequences", "starts",
    )  # fmt: skip

    def __init__(self, launched: PlanInFlight, budget: int, *, limits: bool = False) -> None:
        """limits: some rows may be speculative."""
        self._has_limits = limits
        self.launched = launched
        self.budget = budget
        """Tokens that are left of the step's."""
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.expected: list[int] = []
        self.limits: list[int] = []
        """As in `StepPlan`; empty where no row is ever speculative."""
        self.new_rows: list[NewRow] = []
        self.new_bytes = 0
        """Bytes of the new rows."""
        self.changes: list[RowChange] = []
        self.plain = True
        """One position for every row, and a token from it."""

    def holds(self, sequence: Sequence) -> bool:
        """True if there is room for a sequence that the worker does not know; one such sequence always fits."""
        if not self.new_rows:
            return True
        embeddings = sequence.request.embeddings
        if embeddings is not None and any(new.embeddings is not None for new in self.new_rows):
            return False
        tokens = len(sequence.tokens) * sequence.tokens.itemsize
        return self.new_bytes + _num_bytes(tokens, sequence.sampling, embeddings) <= MOST_NEW_BYTES

    def introduce(self, sequence: Sequence, owner: str, adapter: int, state: int) -> None:
        """The worker hears of a sequence, whose blocks are settled for this step.

        Args:
            owner: see `NewRow.tenant`.
            adapter: its slot; 0 is the base model.
            state: as of `NewRow`.
        """
        new = NewRow(
            row=sequence.row,
            epoch=sequence.epoch,
            request_id=sequence.request.request_id,
            token_ids=sequence.tokens.tobytes(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            blocks=tuple(tuple(table) for table in sequence.tables),
            pooling=sequence.pooling,
            tenant=owner,
            adapter=adapter,
            state=state,
            embeddings=sequence.request.embeddings if sequence.num_computed < sequence.num_prompt_tokens else None,
            media=sequence.request.media,
        )
        sequence.known_to_worker = True
        self.new_rows.append(new)
        self.new_bytes += _num_bytes(len(new.token_ids), new.sampling, new.embeddings)

    def take_span(self, sequence: Sequence, start: int, count: int) -> int:
        """Add a span that is no plain decode; how many of its tokens are a prompt's."""
        self.plain = False
        end = start + count
        samples = end >= len(sequence.tokens)
        if sequence.is_beam:
            self.launched.has_beams, self.launched.clean = True, False
        elif sequence.forced:
            self.launched.clean = False  # its result says which of them are computed
        sequence.num_computed = end
        sequence.last_step = self.launched.step
        if samples:
            sequence.reset_no_check()
        prompt_tokens = 0
        if count > 1 or not sequence.decoding:
            self.launched.prefills.append((sequence, sequence.epoch, count, samples))
            # Behind its tokens its prompt ends in a plan in flight: no prompt waits for this one.
            prompt_tokens = count if start < len(sequence.tokens) else 0
        self.sequences.append(sequence)
        self.starts.append(start)
        self.counts.append(count)
        if self._has_limits:
            self.limits.append(PLAIN)
        self.expected.append(1 if samples and sequence.pooling is None else 0)
        self.budget -= count
        return prompt_tokens

    def record(self, last: PlanInFlight) -> PlanInFlight:
        """The finished plan, as the scheduler keeps it. Columns of `last`, the plan before it, serve again while the
        same sequences run.
        """
        launched, sequences = self.launched, self.sequences
        launched.sequences = launched.samplers = sequences
        if not self.new_rows and sequences == last.sequences:  # no sequence joined or left, so no epoch has changed
            launched.rows, launched.epochs = last.rows, last.epochs
        else:
            launched.rows = tuple([sequence.row for sequence in sequences])
            launched.epochs = tuple([sequence.epoch for sequence in sequences])
        counts = launched.expected = tuple(self.expected)
        if not self.plain:
            counts = tuple(self.counts)
            launched.prefill_tokens = sum([count for _, _, count, _ in launched.prefills])
            if 0 in launched.expected:
                launched.samplers = [s for s, samples in zip(sequences, self.expected, strict=True) if samples]
        launched.counts = counts
        launched.decode_tokens = sum(counts) - launched.prefill_tokens
        if self.limits and max(self.limits) > PLAIN:
            launched.limits = tuple(self.limits)
        return launched

    def step_plan(self, engine_epoch: int, launched: PlanInFlight, **columns: Any) -> StepPlan:
        """The plan as the worker gets it.

        Args:
            launched: as `record` gave it.
            columns: further ones.
        """
        return StepPlan(
            step=launched.step,
            engine_epoch=engine_epoch,
            rows=launched.rows,
            epochs=launched.epochs,
            starts=tuple(self.starts),
            counts=launched.counts,
            draft_limits=launched.limits,
            new_rows=tuple(self.new_rows),
            changes=tuple(self.changes),
            **columns,
        )

    def drop_preempted(self, freed_rows: list[int]) -> None:
        """Take out sequences that lost their blocks after they were planned."""
        kept = [index for index, sequence in enumerate(self.sequences) if sequence.known_to_worker]
        rows = {self.sequences[index].row for index in kept}
        for name in ("sequences", "starts", "counts", "expected", "limits"):
            column = getattr(self, name)
            if not column:
                continue
            setattr(self, name, [column[index] for index in kept])
        self.changes = [change for change in self.changes if change.row in rows]
        for new in self.new_rows:
            if new.row not in rows:
                freed_rows.remove(new.row)  # the worker has not heard of it
        self.new_rows = [new for new in self.new_rows if new.row in rows]
        self.launched.prefills = [entry for entry in self.launched.prefills if entry[0].row in rows]


def _num_bytes(tokens: int, sampling: SamplingState, embeddings: bytes | None) -> int:
    """Bytes of a new row's long parts. tokens: bytes of its token ids."""
    ids = len(sampling.allowed_token_ids) + len(sampling.stop_token_ids) + 3 * len(sampling.logit_bias)
    ids += sum(map(len, sampling.bad_words))
    texts = sum([len(arguments) for _, arguments in sampling.processors])
    if sampling.guide is not None:
        text = sampling.guide.text
        texts += len(text) if text.isascii() else 4 * len(text)
    return tokens + _ID_BYTES * ids + texts + len(embeddings or b"")
