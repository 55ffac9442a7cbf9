"""Plans that were given away and have not come back."""

from collections import deque
from collections.abc import Iterator

from troupellm.actors.sequences.sequence import Sequence


class BrokenResult(RuntimeError):
    """The worker's answer has the wrong shape or order: a worker fault, for a supervisor."""


class Flight:
    """The scheduler's record of one plan. The lists are parallel and in the plan's order."""

    __slots__ = (
        "clean",
        "counts",
        "decode_tokens",
        "epochs",
        "expected",
        "limits",
        "lockstep",
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
        """As in `StepPlan`; empty where no row is elastic."""
        self.samplers: list[Sequence] = []
        """The sequences with 1 in `expected`."""
        self.prefills: list[tuple[Sequence, int, int, bool]] = []
        """(sequence, epoch, tokens, whether it samples) of the rows that are not plain decodes."""
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.lockstep = False
        """Some of the sequences are beams."""
        self.clean = True
        """No sequence of the plan has ended or was preempted since, or has tokens to compute that its guide forced."""


class Flights:
    """In order of their steps."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last_returned = -1
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def full(self) -> bool:
        return len(self._flights) >= self.capacity

    def launch(self, flight: Flight) -> None:
        self._flights.append(flight)

    def find(self, step: int) -> Flight | None:
        """The oldest flight if it is this step's; None for a step that is not in flight.

        Raises:
            BrokenResult: the step overtook an earlier one.
        """
        if self._flights and self._flights[0].step == step:
            return self._flights[0]
        if any(flight.step == step for flight in self._flights):
            raise BrokenResult(f"the result of step {step} overtook that of an earlier step")
        return None

    def land(self, flight: Flight) -> None:
        """Its result is here: the oldest one has come back.

        Raises:
            BrokenResult: it is not the oldest one.
        """
        if self._flights[0] is not flight:
            raise BrokenResult(f"the result of step {flight.step} overtook that of an earlier step")
        self.last_returned = flight.step
        self._flights.popleft()

    def forget(self) -> None:
        """None of them will come back."""
        if self._flights:
            self.last_returned = self._flights[-1].step
            self._flights.clear()

    def disturb(self) -> None:
        """A sequence has ended or was preempted: what is in flight must be read row by row."""
        for flight in self._flights:
            flight.clean = False
