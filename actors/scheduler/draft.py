"""A plan while it is drawn up."""

from troupellm.actors.scheduler.flight import Flight
from troupellm.actors.scheduler.sequence import Sequence
from troupellm.protocol.worker import NewRow, RowChange


class Draft:
    """Parallel lists."""

    __slots__ = (
        "budget", "changes", "counts", "expected", "flight", "limits", "new_rows", "plain", "prefill", "sequences",
        "starts",
    )  # fmt: skip

    def __init__(self, flight: Flight, budget: int) -> None:
        self.flight = flight
        self.budget = budget
        self.prefill = budget
        """How much of it may go to prompts."""
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.expected: list[int] = []
        self.limits: list[int] = []
        """As in `StepPlan`; empty where no row is ever elastic."""
        self.new_rows: list[NewRow] = []
        self.changes: list[RowChange] = []
        self.plain = True
        """One position for every row, and a token from it."""

    @property
    def has_embeddings(self) -> bool:
        return any(new.embeddings is not None for new in self.new_rows)

    def drop_preempted(self, retired: list[int]) -> None:
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
                retired.remove(new.row)  # the worker has not heard of it
        self.new_rows = [new for new in self.new_rows if new.row in rows]
        self.flight.prefills = [entry for entry in self.flight.prefills if entry[0].row in rows]
