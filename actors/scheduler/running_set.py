"""Sequences that hold blocks: running, paused by their reader, or ended with a plan still in flight."""

from collections import Counter
from collections.abc import Container
from typing import NamedTuple

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.adapter_slots import AdapterSlots
from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.plans import PlansInFlight
from troupellm.actors.scheduler.shared_prompts import SharedPrompts, find_shared_prompt
from troupellm.actors.scheduler.victims import Victims
from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.actors.sequences.parts import SharedPrompt
from troupellm.actors.sequences.sequence import NO_EPOCH, Event, Request, Sequence, State
from troupellm.protocol.messages.worker import NULL_BLOCK, RowFork


class _Leaving(NamedTuple):
    """Tables of a sequence that gave up its blocks."""

    step: int
    """The newest one that names it."""
    tables: list[list[int]]
    transfers: set[int]
    """Loads under way into the blocks; each leaves the set when it has ended."""
    ended: Sequence | None = None
    """The sequence, where it ended and left its state."""


class RunningSet:
    """Moves sequences between the waiting queue and the block tables, both ways.

    Blocks that a plan in flight may write come back when that plan has returned; until then they are on their way.
    """

    def __init__(
        self,
        tables: BlockTables,
        waiting_queue: WaitingQueue,
        plans_in_flight: PlansInFlight,
        fair_share: FairShare,
        adapter_slots: AdapterSlots,
    ) -> None:
        self._tables = tables
        self._waiting = waiting_queue
        self._in_flight = plans_in_flight
        self._fair_share = fair_share
        self.running: dict[int, Sequence] = {}
        self.paused: dict[int, Sequence] = {}
        self.held: set[int] = set()
        """Rows that have a reader who does not read, and no blocks."""
        self.loading: dict[int, Sequence] = {}
        """Those that wait for blocks from outer tiers, with and without device blocks."""
        self.victims = Victims(self.running, self.paused, self.loading, fair_share)
        self.adapter_slots = adapter_slots
        self.ending: dict[int, Sequence] = {}
        self.freed_rows: list[int] = []
        """Rows that the worker should forget with the next plan."""
        self.forks: list[RowFork] = []
        """Forks for the worker to make with the next plan, for rows in and out of it."""
        self.shared_prompts = SharedPrompts(tables)
        self.regrouping: dict[int, Request] = {}
        """Searches whose first beam has been computed again, and others have not begun to be."""
        self.num_preemptions = 0
        self.leaving: list[_Leaving] = []
        """Blocks that come back when the plans that name them have returned."""

    def start(self, sequence: Sequence, reserve: int, span: int | None = None) -> bool:
        """From the waiting queue to running, if the blocks suffice. `span`: see `BlockTables.admit`."""
        if not self._tables.admit(sequence, reserve, self._shared_prompt(sequence), span=span):
            return False
        self._waiting.remove(sequence)
        if sequence.request.adapter is not None:
            self.adapter_slots.join(sequence)
        if sequence.tiers.host_hits:
            sequence.handle(Event.LOAD)
            self.loading[sequence.row] = sequence
        else:
            self.run(sequence)
        if sequence.request.shared_prompt is not None:
            self.shared_prompts.settle(sequence.request)
        return True

    def run(self, sequence: Sequence) -> None:
        """It has all the blocks that it needs now."""
        sequence.handle(Event.START)
        sequence.was_preempted = False
        tiers = sequence.tiers
        tiers.asked = tiers.asks_again = tiers.gave_up = False
        self.running[sequence.row] = sequence
        self._fair_share.runs(sequence.request.tenant)

    @property
    def num_rows(self) -> int:
        """Sequences that run, or will as soon as their blocks are loaded."""
        return len(self.running) + sum(1 for sequence in self.loading.values() if sequence.capacity)

    def put_back(self, sequence: Sequence) -> None:
        """To the waiting queue, from waiting for an outer tier; what it has been given of blocks is given back."""
        self._leave(sequence)
        sequence.handle(Event.WAIT)
        sequence.forget_computation()
        self._waiting.add(sequence)
        if sequence.request.paused:
            self.hold(sequence)

    def _shared_prompt(self, sequence: Sequence) -> SharedPrompt | None:
        """A preempted sequence finds more of itself in the prefix cache, unless it must share to fit."""
        if len(sequence.request.sequences) == 1:
            return None
        if sequence.num_generated and self._tables.caching and not sequence.is_beam:
            return None
        return find_shared_prompt(sequence, self._tables)

    def missed_beam(self) -> Sequence | None:
        """A waiting beam without which its siblings cannot go on; it is served before everybody else."""
        for request in sorted(self.regrouping.values(), key=lambda request: self.victims.age(request.sequences[0])):
            for beam in request.sequences:
                if beam in self._waiting:
                    return beam
            del self.regrouping[request.number]
        return None

    def adopt(self, sequence: Sequence, parent: Sequence) -> None:
        """A beam becomes a copy of another one, whose blocks it was given a reference to."""
        if sequence.state is State.WAITING:
            sequence.handle(Event.START)
            if sequence.request.adapter is not None:
                self.adapter_slots.join(sequence)
            self.running[sequence.row] = sequence
            self._fair_share.runs(sequence.request.tenant)
        else:
            self._tables.release(sequence.tables)
        sequence.become(parent)

    def pause(self, sequence: Sequence) -> None:
        sequence.handle(Event.PAUSE)
        self.paused[sequence.row] = self.running.pop(sequence.row)
        self._fair_share.rests(sequence.request.tenant)

    def resume(self, sequence: Sequence) -> None:
        sequence.handle(Event.RESUME)
        self.running[sequence.row] = self.paused.pop(sequence.row)
        self._fair_share.runs(sequence.request.tenant)

    def hold(self, sequence: Sequence) -> None:
        """From the waiting queue to those who wait for their reader first."""
        self._waiting.remove(sequence)
        sequence.handle(Event.PAUSE)
        self.held.add(sequence.row)

    def let_go(self, sequence: Sequence) -> None:
        """To the waiting queue, unless it waits for a sibling to compute its prompt."""
        sequence.handle(Event.RESUME)
        self.held.remove(sequence.row)
        if sequence.request.prompt_computed or sequence is sequence.request.sequences[0]:
            self._waiting.add(sequence)

    def unblock(self) -> bool:
        """Nothing runs because beams wait for siblings that have no blocks: another request makes way.

        Returns:
            False if only the oldest running request is left, which has room when it is alone.
        """
        if self.shared_prompts.release_youngest():
            return True
        first, victim = self.victims.first_to_come(), self.victims.next()
        if first is None or victim is None or victim.request is first.request:
            return False
        self.preempt(victim)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks away. The lost positions are computed again later, from all tokens so far.

        Beams go together, since none can go on without the others; the first one computes first again.
        """
        request = sequence.request
        if request.search is None:
            self._preempt_one(sequence)
            return
        for beam in request.sequences:
            self._waiting.remove(beam)
            if beam.capacity:
                self._preempt_one(beam)
        self._begin_search_again(request)
        self.shared_prompts.drop(request)

    def _begin_search_again(self, request: Request) -> None:
        """No beam has blocks: the first one computes first, the others then share what it has."""
        assert request.search is not None
        request.search.forget()
        request.prompt_computed = False
        self.regrouping.pop(request.number, None)
        for beam in request.sequences[1:]:
            self._waiting.remove(beam)
        if request.sequences[0] not in self._waiting:
            self._waiting.add(request.sequences[0])

    def _preempt_one(self, sequence: Sequence) -> None:
        self._tables.cache_all_blocks(sequence)
        if self._tables.tiers is not None:
            self._tables.tiers.preempted(sequence)
        sequence.was_preempted = True
        self._leave(sequence)
        self._start_over(sequence)
        self.num_preemptions += 1

    def evacuate(self) -> int:
        """The worker's memory is lost: everybody starts over from tokens; how many had been computed."""
        computed = [*self.running.values(), *self.paused.values()]
        for sequence in self.running.values():
            self._fair_share.rests(sequence.request.tenant)
        self.running.clear()
        self.paused.clear()
        self.freed_rows.clear()
        self.forks.clear()
        self.adapter_slots.forget()
        self.shared_prompts.forget()
        self.leaving.clear()
        for sequence in computed:
            sequence.known_to_worker = False
            self._start_over(sequence)
        for sequence in list(self.loading.values()):
            sequence.tables = [[] for _ in sequence.tables]
            sequence.tiers.asked = sequence.tiers.asks_again = False
            sequence.tiers.rounds = 0
            self.put_back(sequence)
        for request in {sequence.request.number: sequence.request for sequence in computed}.values():
            if request.search is not None:
                self._begin_search_again(request)
        self.regrouping.clear()
        return len(computed)

    def make_way(self, members: Container[Request]) -> None:
        """Take the blocks of everybody else, so that these have the worker to themselves. No plan is in flight."""
        counted = self.num_preemptions
        for sequence in [*self.running.values(), *self.paused.values(), *self.loading.values()]:
            if sequence.request not in members and sequence.capacity:
                self.preempt(sequence)
        self.num_preemptions = counted

    def end(self, sequence: Sequence, event: Event) -> bool:
        """End a sequence in any state; True if nothing in flight names it, so that its blocks are free.

        Its computed blocks stay findable, unless it failed: then their contents are not to be trusted.
        """
        self._waiting.remove(sequence)
        if event is Event.FAIL:
            self._tables.forget(sequence)
        else:
            self._tables.cache_all_blocks(sequence)
            if self._tables.tiers is not None:
                self._tables.tiers.ended(sequence)
        sequence.handle(event)
        self._leave(sequence)
        sequence.epoch = NO_EPOCH
        sequence.no_check_until = -1
        if sequence.request.shared_prompt is not None:
            self.shared_prompts.settle(sequence.request)
        if sequence.last_step <= self._in_flight.last_returned:
            return True
        self.ending[sequence.row] = sequence
        return False

    def returned(self) -> list[Sequence]:
        """After a plan came back: free what only it held; the ended sequences that nothing names any more."""
        last_returned = self._in_flight.last_returned
        if self.leaving:
            for step, tables, transfers, sequence in self.leaving:
                if step <= last_returned and not transfers:
                    if sequence is not None and self._tables.states is not None:
                        self._tables.states.cache_rest(sequence, tables)
                    self._tables.release(tables)
            self.leaving = [entry for entry in self.leaving if entry.step > last_returned or entry.transfers]
        if not self.ending:
            return []
        ended = [sequence for sequence in self.ending.values() if sequence.last_step <= last_returned]
        for sequence in ended:
            del self.ending[sequence.row]
        return ended

    def distrust(self, sequence: Sequence) -> None:
        """A plan failed for a sequence that has left meanwhile: others do not find the state that it left, nor what
        such plans computed of it."""
        states = self._tables.states
        if states is not None:
            self.leaving = [entry._replace(ended=None) if entry.ended is sequence else entry for entry in self.leaving]
            states.slots.forget(sequence.keys)

    def _start_over(self, sequence: Sequence) -> None:
        sequence.handle(Event.PREEMPT)
        sequence.forget_computation()
        sequence.paid = True  # or began as a copy of a beam that had
        if sequence.state is State.PREEMPTED:
            self._waiting.add(sequence)
            if sequence.request.paused:  # it was loading
                self.hold(sequence)
        else:
            self.held.add(sequence.row)

    def _leave(self, sequence: Sequence) -> None:
        states = self._tables.states
        if sequence.request.adapter is not None:
            self.adapter_slots.leave(sequence)
        if self.running.pop(sequence.row, None) is not None:
            self._fair_share.rests(sequence.request.tenant)
        self.paused.pop(sequence.row, None)
        self.held.discard(sequence.row)
        if sequence.known_to_worker:
            sequence.known_to_worker = False
            self.freed_rows.append(sequence.row)
            if self.forks:
                self.forks = [fork for fork in self.forks if fork.row != sequence.row]
        transfers: set[int] = set()
        if self._tables.tiers is not None and self.loading.pop(sequence.row, None) is not None:
            transfers = self._tables.tiers.stop_waiting(sequence)
            self._waiting.come_back(sequence)
        if sequence.last_step <= self._in_flight.last_returned and not transfers:
            self._tables.release(sequence.tables)
        else:
            self._in_flight.disturb()
            kept = sequence if states is not None and sequence.ended and states.owns(sequence) else None
            self.leaving.append(_Leaving(sequence.last_step, sequence.tables, transfers, kept))
        if states is not None:
            states.leave(sequence)
        sequence.tables = [[] for _ in sequence.tables]
        sequence.capacity = 0

    def disturb(self) -> None:
        """A sequence has changed since the plans in flight were made: their results are read row by row."""
        self._in_flight.disturb()

    def assert_invariants(self) -> None:
        """Checks places and owners, and through them the pools."""
        for state, place in (
            (State.RUNNING, self.running),
            (State.PAUSED, self.paused),
            (State.LOADING, self.loading),
            (State.FINISHING, self.ending),
        ):
            for row, sequence in place.items():
                assert sequence.row == row, "a sequence is filed under another row"
                assert sequence.state is state, f"a {sequence.state.value} sequence is among the {state.value}"
        places = (self.running, self.paused, self.loading)
        self.adapter_slots.assert_invariants({s.row: s for place in places for s in place.values() if s.capacity})
        holders = [sequence.tables for place in places for sequence in place.values()]
        holders += [entry.tables for entry in self.leaving]
        newest = max((launched.step for launched in self._in_flight), default=self._in_flight.last_returned)
        assert all(entry.step <= newest for entry in self.leaving), "blocks wait for a plan that nobody has"
        holders += self.shared_prompts.holders()
        holders += [] if self._tables.tiers is None else self._tables.tiers.holders()
        self.shared_prompts.assert_invariants()
        if self._tables.states is not None:
            self._tables.states.assert_invariants({s.row for place in places for s in place.values() if s.capacity})
        owners: dict[int, int] = {}
        pool = self._tables.pool
        for tables in holders:
            for group, table in enumerate(tables):
                held = [block for block in table if block != NULL_BLOCK]
                assert table[len(table) - len(held) :] == held, "a block is missing within a window"
                for block in held:
                    assert pool.group_of(block) == group, "a block is in the table of a group that did not take it"
                    owners[block] = owners.get(block, 0) + 1
        pool.assert_invariants(owners)
        counted: dict[str, int] = {}
        for sequence in self.running.values():
            counted[sequence.request.tenant] = counted.get(sequence.request.tenant, 0) + 1
        assert counted == self._fair_share.running, "the running sequences of a tenant are counted wrongly"
        planned = Counter(
            sequence.row
            for launched in self._in_flight
            for sequence, epoch in zip(launched.sequences, launched.epochs, strict=True)
            if sequence.epoch == epoch
        )
        for sequence in (*self.running.values(), *self.paused.values()):
            confirmed = sequence.num_confirmed + planned[sequence.row]
            waits_for_image = not (sequence.known_to_worker or sequence.num_computed)  # it has blocks alone
            least = 0 if waits_for_image else 1
            assert least <= confirmed <= sequence.num_computed, "what a plan in flight computes counts as confirmed"
            assert sequence.num_lookahead_tokens >= 0, "plans in flight take back what was computed"
            assert sequence.num_computed + sequence.num_lookahead_tokens <= sequence.capacity, "no blocks"
            covered = min(map(len, sequence.tables)) * self._tables.block_size
            assert sequence.capacity == covered, "capacity is not the tables'"
            for window, table in zip(self._tables.windows_of(sequence), sequence.tables, strict=True):
                behind = 0 if window is None else max(0, sequence.num_computed + 1 - window)
                given_back = table.count(NULL_BLOCK) * self._tables.block_size
                assert given_back <= behind, "a block that is still seen was given back"
