"""A plan while it is drawn up."""

from typing import Final

from troupellm.actors.scheduler.plans_in_flight import PlanInFlight
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.worker import NewRow, RowChange, SamplingState

MOST_NEW_BYTES: Final = 16 * 2**20
"""Of new rows in one plan, which is one frame to a worker process and must fit it: others begin in the next one."""
_ID_BYTES = 5
"""Of a token id in a frame, at most."""


class StepPlanBuilder:
    """Parallel lists."""

    __slots__ = (
        "budget", "changes", "counts", "expected", "launched", "limits", "new_bytes", "new_rows", "plain", "prefill",
        "sequences", "starts",
    )  # fmt: skip

    def __init__(self, launched: PlanInFlight, budget: int) -> None:
        self.launched = launched
        self.budget = budget
        self.prefill = budget
        """How much of it may go to prompts."""
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

    def introduce(self, sequence: Sequence, owner: str) -> None:
        """The worker hears of a sequence, whose blocks are settled for this step. `owner`: see `NewRow.tenant`."""
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
            embeddings=sequence.request.embeddings if sequence.num_computed < sequence.num_prompt_tokens else None,
        )
        sequence.known_to_worker = True
        self.new_rows.append(new)
        self.new_bytes += _num_bytes(len(new.token_ids), new.sampling, new.embeddings)

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
