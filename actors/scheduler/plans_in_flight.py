"""Plans that were given away and have not come back."""

from collections import deque
from collections.abc import Iterator

from troupellm.actors.sequences.sequence import Sequence


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
