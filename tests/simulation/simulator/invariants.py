"""What must hold after every step of the scheduler, whatever went wrong before.

The numbers are those of the list in the fault table: 1 blocks, 2 states, 3 streams (see `history`), 4 bounds,
5 no freeze, 6 no starvation, 7 finite recomputation, 8 prefix keys, 9 everything back at the end.
"""

from itertools import count
from typing import Any

from troupellm.actors.mailbox import Mailbox
from troupellm.actors.outbox import LocalOutbox
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.scheduler import SubmitRequest
from troupellm.protocol.snapshot import SchedulerSnapshot
from troupellm.protocol.worker import StepPlan


def check_core(core: SchedulerCore) -> list[str]:
    """1, 2 and 5."""
    try:
        core.assert_invariants()
    except AssertionError as error:
        return [f"invariant: {error}"]
    snapshot = core.snapshot()
    wrong = []
    if snapshot.blocks_free + snapshot.blocks_used + snapshot.blocks_cached != snapshot.blocks_total:
        wrong.append(f"1: free, used and cached blocks are not all: {snapshot}")
    if min(snapshot.waiting, snapshot.running, snapshot.paused, snapshot.blocks_used, snapshot.blocks_free) < 0:
        wrong.append(f"2: a count is negative: {snapshot}")
    return wrong


def check_mailbox(box: Mailbox[Any, Any]) -> str | None:
    """4."""
    held = box.snapshot()
    if held.depth > box.capacity + box.control_capacity:
        return f"4: mailbox {box.name} holds {held.depth} of {box.capacity}"
    if held.dropped and box.name != "metrics":
        return f"4: mailbox {box.name} dropped {held.dropped} messages"
    return None


def check_outbox(outbox: LocalOutbox, budget: int, slack: int) -> str | None:
    """4: what a reader has not taken is bounded by its budget and what was under way when it was paused."""
    undelivered = outbox._undelivered
    if outbox._streaming and undelivered > budget + slack:
        return f"4: request {outbox.request} holds {undelivered} undelivered tokens, the budget is {budget}"
    return None


class Turns:
    """6: whoever came first is scheduled first, unless the policy puts the other one into a better class."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._waiting: dict[int, tuple[int, SubmitRequest]] = {}
        """By request: its turn and itself; those that were never scheduled."""
        self._turns = count()

    def arrived(self, message: SubmitRequest) -> None:
        self._waiting[message.request] = (next(self._turns), message)

    def planned(self, plan: StepPlan, owners: dict[int, int], core: SchedulerCore) -> str | None:
        for new in plan.new_rows:
            entry = self._waiting.pop(owners[new.row], None)
            overtaken = None if entry is None else self._overtaken(*entry, core)
            if overtaken is not None:
                return f"6: request {owners[new.row]} was scheduled before request {overtaken}, which came first"
        return None

    def _overtaken(self, turn: int, message: SubmitRequest, core: SchedulerCore) -> int | None:
        for number, (earlier, other) in self._waiting.items():
            request = core._ledger.requests.get(number)
            if earlier < turn and request is not None and not request.paused and self._comes_first(other, message):
                return number
        return None

    def _comes_first(self, earlier: SubmitRequest, later: SubmitRequest) -> bool:
        """Whether arrival decides between these two."""
        if self._policy == "priority":
            return earlier.priority <= later.priority
        return self._policy == "fcfs" or earlier.tenant == later.tenant


def check_baseline(snapshot: SchedulerSnapshot) -> list[str]:
    """9, as far as the scheduler goes."""
    left = {
        name: getattr(snapshot, name)
        for name in ("waiting", "running", "paused", "waiting_tokens", "plans_in_flight", "blocks_used")
        if getattr(snapshot, name)
    }
    return [f"9: after the drain the scheduler still has {left}"] if left else []
