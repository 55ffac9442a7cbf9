"""The invariants that must hold after every step of the scheduler, after all faults.

The numbers are those of the list in the fault table: 1 blocks, 2 states, 3 streams (see `history`), 4 bounds,
5 no freeze, 6 no starvation, 7 finite recomputation, 8 prefix keys, 9 everything back at the end.
"""

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from troupellm.actors.admission.admission import Admission
from troupellm.actors.kv_offload.fetches import Ask
from troupellm.actors.kv_offload.loads import Loading
from troupellm.actors.kv_offload.transfers import LOOKUPS
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.actors.sequences.sequence import Request, State
from troupellm.protocol.messages.scheduler import SubmitRequest
from troupellm.protocol.messages.snapshot import SchedulerSnapshot
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.engines.inside import block_tables_of, ledger_of, offload_of, residents_of, shares_of


def check_core(core: SchedulerCore) -> list[str]:
    """1, 2 and 5."""
    try:
        core.assert_invariants()
    except AssertionError as error:
        return [f"invariant: {error}"]
    snapshot = core.snapshot()
    wrong = _check_tiers(core)
    if snapshot.blocks_free + snapshot.blocks_used + snapshot.blocks_cached != snapshot.blocks_total:
        wrong.append(f"1: free, used and cached blocks are not all: {snapshot}")
    if min(snapshot.waiting, snapshot.running, snapshot.paused, snapshot.blocks_used, snapshot.blocks_free) < 0:
        wrong.append(f"2: a count is negative: {snapshot}")
    return wrong


def _check_tiers(core: SchedulerCore) -> list[str]:
    """1, as far as places of host memory and credits go; `assert_invariants` counts them one by one."""
    offload, wrong = offload_of(core), []
    if offload is None:
        return []
    host, traffic, fetches = offload._host, offload._transfers, offload._fetches
    if not 0 <= host.num_used <= host.num_places:
        wrong.append(f"1: {host.num_used} of {host.num_places} places of host memory are used")
    tiers = range(1 + len(core._ready.tiers))
    left = [traffic.credits(kind, tier) for tier in tiers for kind in (("fetch",) if tier else ("store", "load"))]
    if min(left) < 0:
        wrong.append(f"4: credits are {left}")
    if traffic.num_lookups > LOOKUPS or len(fetches) > LOOKUPS:
        wrong.append(f"4: {traffic.num_lookups} look-ups, {len(fetches)} sequences ask")
    for row, sequence in residents_of(core).loading.items():
        if sequence.ended or sequence.state is not State.LOADING:
            wrong.append(f"2: row {row} is among those that load, and {sequence.state.value}")
    return wrong


def check_loading(core: SchedulerCore, blocks: Iterable[int]) -> list[str]:
    """1: the worker is writing to these blocks, which no other sequence may be given."""
    if core._replay.reason is not None:  # that worker is gone
        return []
    pool = block_tables_of(core).pool
    return [f"1: block {block} is free, and a load writes it" for block in blocks if not pool.references(block)]


def check_mailbox(box: Mailbox[Any, Any]) -> str | None:
    """4."""
    held = box.snapshot()
    if held.depth > box.capacity + box.control_capacity:
        return f"4: mailbox {box.name} holds {held.depth} of {box.capacity}"
    if held.dropped and box.name != "metrics":
        return f"4: mailbox {box.name} dropped {held.dropped} messages"
    return None


def check_outbox(outbox: LocalOutbox, budget: int, margin: int) -> str | None:
    """4: what a reader has not taken is bounded by its budget and what was under way when it was paused."""
    undelivered = outbox._undelivered
    if outbox.streams and undelivered > budget + margin:
        return f"4: request {outbox.request} holds {undelivered} undelivered tokens, the budget is {budget}"
    return None


_STEPS_PER_TOKEN = 2
_SPARE_STEPS = 60


class Turns:
    """6: whoever came first is scheduled first, unless the policy puts the other one into a better class; and who is
    first of its class is scheduled within K steps."""

    def __init__(self, policy: str, priorities: Mapping[str, int]) -> None:
        """priorities: of tenants; they count before a request's own."""
        self._policy = policy
        self._priorities = priorities
        self._waiting: dict[int, _Turn] = {}
        """By request; those that were never scheduled."""
        self._turns = count()
        self._busy_since: dict[str, int] = {}
        """By tenant: the turn with which it came after a rest."""

    def arrived(self, message: SubmitRequest, core: SchedulerCore) -> None:
        turn, tenant = next(self._turns), message.tenant
        newcomer = tenant not in self._busy_since
        running_set, waiting_queue = residents_of(core), core._waiting
        loading = {sequence.request.tenant for sequence in running_set.loading.values()}
        if newcomer or not (shares_of(core).rows(tenant) or tenant in waiting_queue._lines or tenant in loading):
            self._busy_since[tenant] = turn
        self._waiting[message.request] = _Turn(turn, message, newcomer=newcomer)

    def planned(self, plan: StepPlan, owners: dict[int, int], core: SchedulerCore) -> str | None:
        held = [] if core.guides is None else core.guides.held
        held = held if core.adapters is None else held + core.adapters.held
        for sequence in (*residents_of(core).loading.values(), *held):  # its turn has come: it waits for what it needs
            self._waiting.pop(sequence.request.number, None)
        for new in plan.new_rows:
            turn = self._waiting.pop(owners[new.row], None)
            overtaken = None if turn is None else self._overtaken(turn, core)
            if overtaken is not None:
                return f"6: request {owners[new.row]} was scheduled before request {overtaken}, which came first"
        return self._starved(plan, core)

    def _waits(self, number: int, core: SchedulerCore) -> bool:
        request = ledger_of(core).requests.get(number)
        return request is not None and not request.paused

    def _overtaken(self, turn: "_Turn", core: SchedulerCore) -> int | None:
        for number, other in self._waiting.items():
            if self._waits(number, core) and self._comes_first(other, turn):
                return number
        return None

    def _comes_first(self, other: "_Turn", turn: "_Turn") -> bool:
        """Whether the other one should have been served before the one whose turn it was."""
        if self._policy == "priority":
            return (*self._rank(other), other.number) < (*self._rank(turn), turn.number)
        if other.number > turn.number:
            return False
        if self._policy == "fcfs" or other.message.tenant == turn.message.tenant:
            return True
        # A tenant that was never served goes first, but one that comes after a rest later still.
        return other.newcomer and self._busy_since[turn.message.tenant] < other.number

    def _rank(self, turn: "_Turn") -> tuple[int, int]:
        return self._priorities.get(turn.message.tenant, 0), turn.message.priority

    def _starved(self, plan: StepPlan, core: SchedulerCore) -> str | None:
        """The first to come of all who wait: everybody before it has only so much to compute."""
        waiting = [number for number in self._waiting if self._waits(number, core)]
        if self._policy == "priority":
            waiting.sort(key=lambda number: self._rank(self._waiting[number]))  # stable
        if not waiting or not plan.rows:  # such a plan asks after transfers
            return None
        turn = self._waiting[waiting[0]]
        turn.steps += 1
        most = _STEPS_PER_TOKEN * sum(_work(request) for request in ledger_of(core).requests.values()) + _SPARE_STEPS
        turn.most = max(turn.most, most)  # what those before it had to compute when it became the first counts too
        if turn.steps > turn.most:
            return f"6: request {waiting[0]} was first in line for {turn.steps} steps"
        return None


class _Turn:
    __slots__ = ("message", "most", "newcomer", "number", "steps")

    def __init__(self, number: int, message: SubmitRequest, *, newcomer: bool) -> None:
        self.number = number
        self.message = message
        self.newcomer = newcomer
        """Its tenant had never asked for anything."""
        self.steps = 0
        """Since it was the first in line."""
        self.most = 0


def _work(request: Request) -> int:
    """Positions that a request has computed in the end, if nothing is computed twice."""
    return len(request.sequences) * (request.num_prompt_tokens + request.max_tokens)


def check_baseline(snapshot: SchedulerSnapshot) -> list[str]:
    """9, as far as the scheduler goes."""
    left = {
        name: getattr(snapshot, name)
        for name in ("waiting", "running", "paused", "waiting_tokens", "plans_in_flight", "blocks_used")
        if getattr(snapshot, name)
    }
    if snapshot.adapters is not None and (snapshot.adapters.slots_used or snapshot.adapters.waiting):
        left["adapters"] = snapshot.adapters
    if snapshot.offload is not None:
        shown = snapshot.offload
        left |= {
            name: getattr(shown, name)
            for name in ("loading", "transfers", "lookups", "waiting_spills")
            if getattr(shown, name)
        }
    return [f"9: after the drain the scheduler still has {left}"] if left else []


def waiting_for(core: SchedulerCore | None, transfer: int) -> list[int]:
    """Requests of which a sequence is LOADING and waits for a transfer."""
    if core is None or offload_of(core) is None:
        return []
    fetching = offload_of(core)._fetches._fetching
    found = []
    for sequence in residents_of(core).loading.values():
        loading = sequence.tiers.loading
        if isinstance(loading, Loading):
            waits = transfer in loading.pending
        else:
            assert isinstance(loading, Ask)
            waits = any(fetching[key].transfer == transfer for key in loading.pending)
        if waits:
            found.append(sequence.request.number)
    return found


def check_admission(admission: Admission) -> list[str]:
    """9, at the door."""
    tokens = admission._tokens
    left = {
        "sequences": admission._sequences.used,
        "tokens": 0 if tokens is None else tokens.used,
        "in line": admission.waiting,
        "parties": len(admission._groups),
    }
    return [f"9: at the end the door still counts {left}"] if any(left.values()) else []
