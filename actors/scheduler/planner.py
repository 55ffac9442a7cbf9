"""The token-budget loop. Its one unit is "tokens to compute for this sequence".

Prefill, a chunk of it, decode and verification of drafts are the same thing at different counts. Running sequences come
first (plain decodes, then those that need blocks or have more tokens to compute), then the waiting queue, until the
step's tokens, its rows or the blocks are used up.
"""

from collections.abc import Callable
from functools import partial

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.adapter_gate import AdapterGate
from troupellm.actors.scheduler.encoders import Encoders
from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.guide_gate import GuideGate
from troupellm.actors.scheduler.kv_offload import Offload
from troupellm.actors.scheduler.plans import PlanInFlight, PlansInFlight, StepPlanBuilder
from troupellm.actors.scheduler.quarantine import Quarantine
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.scheduler.speculative_rows import SpeculativeRows
from troupellm.actors.scheduler.step_budget import PrefillBudget, PrefillSplit, StepTokens
from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.messages.copies import NO_STATE
from troupellm.protocol.messages.worker import RowChange, StepPlan

_MOST_FOUND_TOKENS = 1 << 15
"""Admission of one plan ends after so many tokens from the prefix cache, whose look-up takes 50 ns each."""
_RESERVE_SHARE = 100
"""While others run, admission leaves one in so many blocks for them to grow into."""

_Blocks = tuple[tuple[int, ...], ...]
"""Per cache group."""


class SchedulerFrozen(RuntimeError):
    """A sequence could run and was not planned: a bug of ours, raised instead of waiting for ever."""


class Planner:
    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        waiting_queue: WaitingQueue,
        plans_in_flight: PlansInFlight,
        running_set: RunningSet,
        fair_share: FairShare,
        prefill_budget: PrefillBudget,
        quarantine: Quarantine,
        engine_epoch: int,
        *,
        whole_prompts: bool = False,
        offload: Offload | None = None,
    ) -> None:
        """whole_prompts: the model needs all of a prompt in one step, however small steps have become."""
        self._max_rows = config.max_num_seqs
        self.tokens = StepTokens(config, whole_prompts=whole_prompts)
        self._whole_prompts = whole_prompts
        self._tables, self._waiting, self._offload = tables, waiting_queue, offload
        self._in_flight, self._running_set = plans_in_flight, running_set
        self._fair_share, self._prefill_split = fair_share, PrefillSplit(fair_share)
        self._prefill_budget, self._quarantine = prefill_budget, quarantine
        self.engine_epoch = engine_epoch
        self.speculative_rows: SpeculativeRows | None = None
        """Where the worker verifies drafts."""
        self.guides: GuideGate | None = None
        """None: the worker builds guides when it needs them."""
        self.adapters: AdapterGate | None = None
        """None: no adapters are served."""
        self.encoders: Encoders | None = None
        """None: no images are encoded."""
        self.step = 0  # plans made
        self._blocked: Sequence | None = None
        """The first waiting sequence of the last plan, if it did not get enough blocks."""
        self._last = PlanInFlight(-1, 0.0)
        """The newest plan, whose columns serve again while the same sequences run."""

    def forget(self) -> None:
        """The plans made are lost: none of their columns is used again."""
        self._last = PlanInFlight(-1, 0.0)
        self._blocked = None
        if self.encoders is not None:
            self.encoders.forget()

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when nothing can be computed before something else happens.

        A step without rows asks after transfers, where nothing else can be done until one has ended.
        """
        running_set = self._running_set
        while True:  # again where a sequence gave up its blocks and none could use them yet
            if self._offload is not None:
                self._offload.pump(now)
            builder, gave_way = self._draw(now)
            if builder.sequences:
                self._fair_share.charge_step()
                return self._seal(builder)
            if gave_way or (not self._in_flight and not running_set.leaving and running_set.unblock()):
                continue
            if self._offload is not None and self._offload.busy and not self._in_flight:
                return self._seal(builder)
            self._check_not_frozen()
            return None

    def _draw(self, now: float) -> tuple[StepPlanBuilder, bool]:
        """Draw up a plan: decodes, then prompts of running sequences, then new ones. Also whether a sequence lost its
        blocks to another one meanwhile.
        """
        tokens = self.tokens
        if tokens.most < tokens.usual:
            tokens.grow(self.step)
        builder = StepPlanBuilder(PlanInFlight(self.step, now), tokens.most, limits=self.speculative_rows is not None)
        running_set = self._running_set
        if self.adapters is not None:
            self.adapters.review(now, self._quarantine.members)
        if self.encoders is not None:
            self.encoders.begin()
        self._make_way()
        turn = self._in_turn()
        if self.speculative_rows is None:
            others = self._plan_decodes(builder, turn)
        else:
            others = self.speculative_rows.plan(builder, turn, self.step, crowded=self._waiting.size > 0)
        if not others and not self._waiting.size:
            return builder, False
        preemptions = running_set.num_preemptions
        prefill, starved = self._plan_others(builder, others, self._prompt_tokens(builder))
        if running_set.num_preemptions > preemptions:
            builder.drop_preempted(running_set.freed_rows)
        elif not starved:
            self._admit(builder, prefill, now)
            if not builder.sequences:  # the sequence that a part was kept for did not get blocks
                for sequence in others:
                    if sequence.row in running_set.running:
                        prefill -= self._plan_span(builder, sequence, prefill) or 0
                builder.drop_preempted(running_set.freed_rows)
        return builder, running_set.num_preemptions > preemptions

    def _in_turn(self) -> list[Sequence]:
        """Running sequences, as many as a step has room for. There are more where readers resumed: those that waited
        longest go first.
        """
        turn = list(self._running_set.running.values())
        most = min(self._max_rows, self.tokens.most)
        if len(turn) <= most:
            return turn
        able = [sequence for sequence in turn if not sequence.waits_for_siblings]
        return sorted(able, key=lambda sequence: sequence.last_step)[:most]

    def _prompt_tokens(self, builder: StepPlanBuilder) -> int:
        """Tokens of the step that may go to prompts."""
        running_set = self._running_set
        streaming = any(sequence.request.streaming for sequence in builder.sequences)
        alone = len(running_set.running) + self._waiting.size + len(running_set.loading) == 1
        return self._prefill_budget.tokens(len(builder.sequences), streaming=streaming, alone=alone)

    def _plan_others(self, builder: StepPlanBuilder, others: list[Sequence], prefill: int) -> tuple[int, bool]:
        """Plan running sequences that want more than a plain position, each tenant within its part of `prefill` tokens.

        Returns:
            The tokens that are left, and whether blocks were missing for a part.
        """
        running_set, left, starved = self._running_set, prefill, False
        starts_first = running_set.num_rows < self._max_rows
        for sequences, tokens in self._prefill_split.of_step(
            self.step, prefill, others, self._next(), starts_first=starts_first
        ):
            part = most = min(tokens, left)
            for sequence in sequences:
                if sequence.row not in running_set.running:
                    continue
                taken = self._plan_span(builder, sequence, part)
                if taken is not None:
                    part -= taken
                elif part > 0:
                    starved = True
                    self._prefill_split.keep_turn(sequence.request.tenant)
            # A plan without chunking may overshoot; single-token rows do not count against the tenant's part.
            left -= most - (max(0, part) if self.tokens.chunked else part)
        return left, starved

    def _next(self) -> Sequence | None:
        """The next waiting sequence."""
        quarantine = self._quarantine
        return self._waiting.first() if quarantine.members is None else quarantine.first(self._waiting)

    def _make_way(self) -> None:
        """Let a tenant who runs less than a fair share have a row, or the blocks that its next sequence lacked.

        One sequence per plan gives way, before anything is planned: what it computed mostly stays in the prefix cache.
        """
        blocked, self._blocked = self._blocked, None
        if not self._waiting.size or self._running_set.leaving:
            return
        first = self._next()
        if first is None or (self._running_set.num_rows < self._max_rows and first is not blocked):
            return
        victim = self._running_set.victims.in_the_way(first)
        if victim is not None:
            self._running_set.preempt(victim)

    def _plan_decodes(self, builder: StepPlanBuilder, turn: list[Sequence]) -> list[Sequence]:
        """Plan one position for each sequence below its `no_check_until`, or for which a block is free; the others."""
        step = self.step
        starts: list[int] = []
        others: list[Sequence] = []
        for sequence in turn:
            start = sequence.num_computed
            if start < sequence.no_check_until or self._extends_no_check(builder, sequence, start):
                sequence.num_computed = start + 1
                sequence.last_step = step
                starts.append(start)
            else:
                others.append(sequence)
        if others:
            left_out = {sequence.row for sequence in others}
            turn = [sequence for sequence in turn if sequence.row not in left_out]
        builder.sequences, builder.starts = turn, starts
        builder.counts = [1] * len(starts)
        builder.expected = builder.counts.copy()
        builder.budget -= len(starts)
        return others

    def _extends_no_check(self, builder: StepPlanBuilder, sequence: Sequence, start: int) -> bool:
        """A decoding sequence has filled its blocks: give it another one, if that takes none from anybody."""
        decodes = sequence.decoding and start == sequence.capacity and len(sequence.tokens) - start <= 1
        if not decodes or sequence.is_beam or start >= sequence.limit - 1:
            return False
        added = self._tables.grow(sequence, start + 1)
        if added is None:
            return False
        if self._tables.states is not None:
            self._tables.states.span(sequence, start, 1)
        builder.changes.append(RowChange(row=sequence.row, appended_blocks=added))
        sequence.reset_no_check()
        return True

    def _plan_span(self, builder: StepPlanBuilder, sequence: Sequence, prefill: int) -> int | None:
        """Plan what a running sequence wants, as far as the budget goes: how many of the `prefill` tokens it took. None
        if budget or blocks were missing.
        """
        start = sequence.num_computed
        if start >= sequence.limit - 1 or sequence.waits_for_siblings:
            return 0  # its last token is on the way, or not decided yet
        if self.speculative_rows is not None and self.speculative_rows.takes(sequence):
            return 0 if self.speculative_rows.plan_one(builder, sequence, self.step, self._make_room) else None
        count = self.tokens.allowed(max(len(sequence.tokens) - start, 1), builder.budget, prefill)
        if count == 0 or not (sequence.known_to_worker or builder.holds(sequence)):
            return None
        if self.encoders is not None and not (count := self.encoders.reach(sequence, start, count)):
            return 0  # the next plan encodes the image before it
        states = self._tables.states
        count = count if states is None else states.span(sequence, start, count)
        if start + count > sequence.capacity:
            added = self._make_room(sequence, partial(self._tables.grow, sequence, start + count))
            if added is None:
                return None
            if sequence.known_to_worker:
                builder.changes.append(RowChange(row=sequence.row, appended_blocks=added))
        elif sequence.is_beam:
            copied = self._make_room(sequence, partial(self._tables.own, sequence, start))
            if copied is None:
                return None
            if copied and sequence.known_to_worker:
                builder.changes.append(RowChange(row=sequence.row, dropped_blocks=1, appended_blocks=copied))
        if not sequence.known_to_worker:
            self._introduce(builder, sequence)
        return builder.take_span(sequence, start, count)

    def _make_room(self, sequence: Sequence, take: Callable[[], _Blocks | None]) -> _Blocks | None:
        """Blocks for a sequence that needs more, taken from others if need be; None when there are none yet."""
        while (added := take()) is None:
            if self._running_set.shared_prompts.release_youngest():
                continue
            if self._running_set.leaving:
                return None
            victim = self._running_set.victims.next()
            if victim is None:
                return None
            for leaving in victim.request.sequences if victim.is_beam else (victim,):
                if leaving.last_step == self.step:  # it leaves this plan before the plan is given away
                    leaving.last_step -= 1
                    if self._tables.states is not None:  # it stands where the plan would have begun
                        self._tables.states.drop(leaving)
            self._running_set.preempt(victim)
            if not sequence.capacity:  # it was the victim, or a beam of the same search
                return None
        return added

    def _admit(self, builder: StepPlanBuilder, prefill: int, now: float) -> None:
        """Start waiting sequences in their order; the first that does not fit holds the others back.

        Args:
            prefill: tokens that may go to their prompts.
        """
        running_set, tables, offload = self._running_set, self._tables, self._offload
        most_found = tables.num_found_tokens + _MOST_FOUND_TOKENS
        while builder.budget > 0 and running_set.num_rows < self._max_rows and tables.num_found_tokens < most_found:
            missed = running_set.missed_beam()
            sequence = missed or self._next()
            if sequence is None or not builder.holds(sequence):
                return
            if not self.tokens.allowed(sequence.num_wanted, builder.budget, prefill):
                return
            if self._lacks(sequence):
                continue
            if offload is not None and offload.asks_first(sequence):
                if not offload.may_ask:
                    return
                offload.ask(sequence)
                continue
            reserve = 0 if missed or not running_set.num_rows else -(-tables.num_blocks // _RESERVE_SHARE)
            while not running_set.start(sequence, reserve, None if self._whole_prompts else builder.budget):
                if not running_set.running and running_set.shared_prompts.release_youngest():
                    continue
                if running_set.leaving or not running_set.paused:
                    self._blocked = sequence
                    return
                victim = running_set.victims.next()
                if victim is None:
                    return
                running_set.preempt(victim)
            request, start = sequence.request, sequence.num_computed
            started = request.scheduled is None
            sources = None if offload is None else offload.admitted(sequence, started=started)
            if started:
                request.scheduled = now
                request.cached_tokens, request.cached_sources = min(start, request.num_prompt_tokens), sources
            if not sequence.paid:  # before the first start, however often outer tiers were asked
                sequence.paid = True
                self._fair_share.charge(request.tenant, len(sequence.tokens) - start)
            if sequence.tiers.loading is not None:
                continue
            # A fork that was to share its prompt may find it gone, and no prompt tokens left: it begins all the same.
            count = max(1, self.tokens.allowed(len(sequence.tokens) - start, builder.budget, prefill))
            if self.encoders is not None and not (count := self.encoders.reach(sequence, start, count)):
                continue  # the next plan encodes the image before it
            self._introduce(builder, sequence)
            if tables.states is not None:
                count = tables.states.span(sequence, start, count)
            prefill -= builder.take_span(sequence, start, count)

    def _lacks(self, sequence: Sequence) -> bool:
        """Hold a waiting sequence whose guide or adapter the worker does not have."""
        if sequence.sampling.guide is not None and self.guides is not None and self.guides.lacks(sequence):
            self.guides.hold(sequence, urgent=self._quarantine.members is not None)
            return True
        if self.adapters is not None and self.adapters.lacks(sequence):
            self.adapters.hold(sequence)
            return True
        return False

    def _introduce(self, builder: StepPlanBuilder, sequence: Sequence) -> None:
        owner = "" if self.speculative_rows is None else sequence.request.owner
        states = self._tables.states
        state = NO_STATE if states is None else states.slot_of(sequence)
        adapter = 0 if sequence.request.adapter is None else self._running_set.adapter_slots.number_of(sequence)
        builder.introduce(sequence, owner, adapter, state)

    def _seal(self, builder: StepPlanBuilder) -> StepPlan:
        launched = self._last = builder.record(self._last)
        transfers, lookups, cancelled = ((), (), ()) if self._offload is None else self._offload.take()
        forgotten, encode = ((), ()) if self.encoders is None else self.encoders.take()
        plan = builder.step_plan(
            self.engine_epoch,
            launched,
            freed_rows=tuple(self._running_set.freed_rows),
            forks=tuple(self._running_set.forks),
            copies=self._tables.take_copies(),
            states=() if self._tables.states is None else self._tables.states.slots.take_copies(),
            transfers=transfers,
            lookups=lookups,
            cancelled=cancelled,
            adapters=() if self.adapters is None else self.adapters.take_changes(self.step),
            forgotten=forgotten,
            encode=encode,
        )
        if self.guides is not None and any(row.sampling.guide is not None for row in plan.new_rows):
            self.guides.started(plan.new_rows)
        self._running_set.freed_rows.clear()
        self._running_set.forks.clear()
        self._in_flight.launch(launched)
        self.step += 1
        return plan

    @property
    def num_held(self) -> int:
        """Sequences that wait for nothing but their guide or adapter."""
        guided = 0 if self.guides is None else self.guides.num_held
        return guided if self.adapters is None else guided + len(self.adapters.held)

    def _check_not_frozen(self) -> None:
        """With no plan in flight who came first can always go on: admission made sure that it fits alone."""
        num_running, num_waiting = len(self._running_set.running), self._waiting.size
        if self._in_flight or not (num_running or num_waiting):
            return
        if not self.num_held:  # suspects among them keep others waiting
            raise SchedulerFrozen(f"{num_running} sequences run, {num_waiting} wait, and nothing was planned")
