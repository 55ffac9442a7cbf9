"""The token-budget loop. Its one unit is "tokens to compute for this sequence".

Prefill, a chunk of it, decode and verification of drafts are the same thing at different counts. Running sequences come
first (plain decodes, then those that need blocks or have more tokens to compute), then the waiting queue, until the
step's tokens, its rows or the blocks are used up.
"""

from collections.abc import Callable
from functools import partial

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.guide_gate import GuideGate
from troupellm.actors.scheduler.kv_offload import Offload
from troupellm.actors.scheduler.plan_builder import StepPlanBuilder
from troupellm.actors.scheduler.plans_in_flight import PlanInFlight, PlansInFlight
from troupellm.actors.scheduler.prefill_budget import PrefillBudget
from troupellm.actors.scheduler.prefill_split import PrefillSplit
from troupellm.actors.scheduler.quarantine import Quarantine
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.scheduler.speculative_rows import PLAIN, SpeculativeRows
from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.messages.worker import RowChange, StepPlan

_MOST_FOUND_TOKENS = 1 << 15
"""Admission of one plan ends after so many tokens from the prefix cache, whose look-up takes 50 ns each."""
_RESERVE_SHARE = 100
"""While others run, admission leaves one in so many blocks for them to grow into."""

_Blocks = tuple[tuple[int, ...], ...]
"""Per cache group."""
_CAREFUL_STEPS = 64
"""So many steps after one found no memory, steps may be twice as large again."""


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
        self._max_tokens = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill and not whole_prompts
        self._whole_prompts = whole_prompts
        self._offload = offload
        self._tables = tables
        self._waiting_queue = waiting_queue
        self._in_flight = plans_in_flight
        self._running_set = running_set
        self._fair_share = fair_share
        self._prefill_split = PrefillSplit(fair_share)
        self._prefill_budget = prefill_budget
        self._quarantine = quarantine
        self.engine_epoch = engine_epoch
        self.speculative_rows: SpeculativeRows | None = None
        """Where the worker verifies drafts."""
        self.guides: GuideGate | None = None
        """None: the worker builds guides when it needs them."""
        self._step_tokens = self._max_tokens
        """Less than `max_num_batched_tokens` for a while after a step found no memory."""
        self._grows_at = 0
        self.step = 0
        """Plans made."""
        self._blocked: Sequence | None = None
        """The first waiting sequence of the last plan, if it did not get enough blocks."""
        self._last = PlanInFlight(-1, 0.0)
        """The newest plan, whose columns serve again while the same sequences run."""

    def shrink(self) -> None:
        """A step found no memory: the next ones compute half as much, then carefully more."""
        self._step_tokens = max(1, self._step_tokens // 2)
        self._grows_at = self.step + _CAREFUL_STEPS

    def forget(self) -> None:
        """The plans made are lost: none of their columns is used again."""
        self._last = PlanInFlight(-1, 0.0)
        self._blocked = None

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None when nothing can be computed before something else happens.

        A step without rows asks after transfers, where nothing else can be done until one has ended.
        """
        if self._offload is not None:
            self._offload.pump(now)
        launched = PlanInFlight(self.step, now)
        if self._step_tokens < self._max_tokens and self.step >= self._grows_at:
            self._step_tokens = min(2 * self._step_tokens, self._max_tokens)
            self._grows_at = self.step + _CAREFUL_STEPS
        builder = StepPlanBuilder(launched, self._step_tokens)
        running = self._running_set.running
        self._make_way()
        turn = list(running.values())
        most = min(self._max_rows, self._step_tokens)
        if len(turn) > most:  # resumed readers came on top: those who waited longest go first
            able = [sequence for sequence in turn if not sequence.waits_for_siblings]
            turn = sorted(able, key=lambda sequence: sequence.last_step)[:most]
        if self.speculative_rows is None:
            others = self._plan_decodes(builder, turn)
        else:
            others = self.speculative_rows.plan(builder, turn, self.step, crowded=len(self._waiting_queue) > 0)
        preemptions = self._running_set.num_preemptions
        starved = False
        if others or len(self._waiting_queue):
            streaming = any(sequence.request.streaming for sequence in builder.sequences)
            alone = len(running) + len(self._waiting_queue) + len(self._running_set.loading) == 1
            builder.prefill = self._prefill_budget.tokens(len(builder.sequences), streaming=streaming, alone=alone)
            left = builder.prefill
            first = self._next()
            more = self._running_set.num_rows < self._max_rows
            for sequences, part in self._prefill_split.of_step(
                self.step, builder.prefill, others, first, starts_first=more
            ):
                builder.prefill = before = min(part, left)
                for sequence in sequences:
                    if sequence.row in running and not self._plan_span(builder, sequence) and builder.prefill > 0:
                        starved = True
                        self._prefill_split.keep_turn(sequence.request.tenant)
                # A plan without chunking may overshoot; single-token rows do not count against the tenant's part.
                left -= before - (max(0, builder.prefill) if self._chunked else builder.prefill)
            builder.prefill = left
        if self._running_set.num_preemptions > preemptions:
            builder.drop_preempted(self._running_set.freed_rows)
        elif not starved:
            self._admit(builder, now)
            if not builder.sequences:  # the sequence that a part was kept for did not get blocks
                for sequence in others:
                    if sequence.row in running:
                        self._plan_span(builder, sequence)
                builder.drop_preempted(self._running_set.freed_rows)
        if not builder.sequences:
            gave_way = self._running_set.num_preemptions > preemptions  # the sequence in turn gave up its own blocks
            running_set = self._running_set
            if gave_way or (not self._in_flight and not running_set.blocks_leaving and running_set.unblock()):
                return self.plan(now)
            if self._offload is not None and self._offload.busy and not self._in_flight:
                return self._seal(builder)
            self._check_not_frozen()
            return None
        self._fair_share.charge_step()
        return self._seal(builder)

    def _next(self) -> Sequence | None:
        """The next waiting sequence."""
        quarantine = self._quarantine
        return self._waiting_queue.first() if quarantine.members is None else quarantine.first(self._waiting_queue)

    def _make_way(self) -> None:
        """Let a tenant who runs less than a fair share have a row, or the blocks that its next sequence lacked.

        One sequence per plan gives way, before anything is planned: what it computed mostly stays in the prefix cache.
        """
        blocked, self._blocked = self._blocked, None
        if not len(self._waiting_queue) or self._running_set.blocks_leaving:
            return
        first = self._next()
        if first is None or (self._running_set.num_rows < self._max_rows and first is not blocked):
            return
        victim = self._running_set.in_the_way(first)
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
        builder.changes.append(RowChange(row=sequence.row, appended_blocks=added))
        sequence.reset_no_check()
        return True

    def _plan_span(self, builder: StepPlanBuilder, sequence: Sequence) -> bool:
        """Plan what a running sequence wants, as far as the budget goes; False if budget or blocks were missing."""
        start = sequence.num_computed
        if start >= sequence.limit - 1 or sequence.waits_for_siblings:
            return True  # its last token is on the way, or not decided yet
        if self.speculative_rows is not None and self.speculative_rows.takes(sequence):
            return self.speculative_rows.plan_one(builder, sequence, self.step, self._make_room)
        count = self._allowed(max(len(sequence.tokens) - start, 1), builder)
        if count == 0 or not (sequence.known_to_worker or builder.holds(sequence)):
            return False
        if start + count > sequence.capacity:
            added = self._make_room(sequence, partial(self._tables.grow, sequence, start + count))
            if added is None:
                return False
            if sequence.known_to_worker:
                builder.changes.append(RowChange(row=sequence.row, appended_blocks=added))
        elif sequence.is_beam:
            copied = self._make_room(sequence, partial(self._tables.own, sequence, start))
            if copied is None:
                return False
            if copied and sequence.known_to_worker:
                builder.changes.append(RowChange(row=sequence.row, dropped_blocks=1, appended_blocks=copied))
        if not sequence.known_to_worker:
            self._introduce(builder, sequence)
        self._take_span(builder, sequence, start, count)
        return True

    def _make_room(self, sequence: Sequence, take: Callable[[], _Blocks | None]) -> _Blocks | None:
        """Blocks for a sequence that needs more, taken from others if need be; None when there are none yet."""
        while (added := take()) is None:
            if self._running_set.shared_prompts.release_youngest():
                continue
            if self._running_set.blocks_leaving:
                return None
            victim = self._running_set.victim()
            if victim is None:
                return None
            for leaving in victim.request.sequences if victim.is_beam else (victim,):
                if leaving.last_step == self.step:  # it leaves this plan before the plan is given away
                    leaving.last_step -= 1
            self._running_set.preempt(victim)
            if not sequence.capacity:  # it was the victim, or a beam of the same search
                return None
        return added

    def _allowed(self, wanted: int, builder: StepPlanBuilder) -> int:
        """Tokens of the budget for a sequence. Without chunking all or none, except what exceeds a whole step."""
        if wanted == 1:
            return max(0, min(1, builder.budget))
        if self._chunked:
            return max(0, min(wanted, builder.budget, builder.prefill))
        if wanted <= builder.budget:
            return wanted if builder.prefill > 0 else 0
        if builder.budget < self._step_tokens:
            return 0
        return wanted if self._whole_prompts else builder.budget

    def _take_span(self, builder: StepPlanBuilder, sequence: Sequence, start: int, count: int) -> None:
        builder.plain = False
        end = start + count
        samples = end >= len(sequence.tokens)
        if sequence.is_beam:
            builder.launched.has_beams, builder.launched.clean = True, False
        elif sequence.forced:
            builder.launched.clean = False  # its result says which of them are computed
        sequence.num_computed = end
        sequence.last_step = self.step
        if samples:
            sequence.reset_no_check()
        if count > 1 or not sequence.decoding:
            builder.launched.prefills.append((sequence, sequence.epoch, count, samples))
            if start < len(sequence.tokens):  # else its prompt ends in a plan in flight: no prompt waits for this one
                builder.prefill -= count
        builder.sequences.append(sequence)
        builder.starts.append(start)
        builder.counts.append(count)
        if self.speculative_rows is not None:
            builder.limits.append(PLAIN)
        builder.expected.append(1 if samples and sequence.pooling is None else 0)
        builder.budget -= count

    def _admit(self, builder: StepPlanBuilder, now: float) -> None:
        """Start waiting sequences in their order; the first that does not fit holds the others back."""
        running_set, tables, offload = self._running_set, self._tables, self._offload
        most_found = tables.num_found_tokens + _MOST_FOUND_TOKENS
        while builder.budget > 0 and running_set.num_rows < self._max_rows and tables.num_found_tokens < most_found:
            missed = running_set.missed_beam()
            sequence = missed or self._next()
            if sequence is None or not self._allowed(sequence.num_wanted, builder) or not builder.holds(sequence):
                return
            if self.guides is not None and self.guides.lacks(sequence):
                self.guides.hold(sequence, urgent=self._quarantine.members is not None)
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
                if running_set.blocks_leaving or not running_set.paused:
                    self._blocked = sequence
                    return
                victim = running_set.victim()
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
            if sequence.loading is not None:
                continue
            self._introduce(builder, sequence)
            # A fork that was to share its prompt may find it gone, and no prompt tokens left: it begins all the same.
            self._take_span(builder, sequence, start, max(1, self._allowed(len(sequence.tokens) - start, builder)))

    def _introduce(self, builder: StepPlanBuilder, sequence: Sequence) -> None:
        builder.introduce(sequence, "" if self.speculative_rows is None else sequence.request.owner)

    def _seal(self, builder: StepPlanBuilder) -> StepPlan:
        launched = builder.launched
        sequences = builder.sequences
        launched.sequences = sequences
        last = self._last
        if not builder.new_rows and sequences == last.sequences:  # no sequence joined or left, so no epoch has changed
            launched.rows, launched.epochs = last.rows, last.epochs
        else:
            launched.rows = tuple([sequence.row for sequence in sequences])
            launched.epochs = tuple([sequence.epoch for sequence in sequences])
        self._last = launched
        counts = launched.expected = tuple(builder.expected)
        launched.samplers = sequences
        if not builder.plain:
            counts = tuple(builder.counts)
            launched.prefill_tokens = sum([count for _, _, count, _ in launched.prefills])
            if 0 in launched.expected:
                launched.samplers = [s for s, samples in zip(sequences, builder.expected, strict=True) if samples]
        launched.counts = counts
        launched.decode_tokens = sum(counts) - launched.prefill_tokens
        if builder.limits and max(builder.limits) > PLAIN:
            launched.limits = tuple(builder.limits)
        transfers, lookups, cancelled = ((), (), ()) if self._offload is None else self._offload.take()
        plan = StepPlan(
            step=self.step,
            engine_epoch=self.engine_epoch,
            rows=launched.rows,
            epochs=launched.epochs,
            starts=tuple(builder.starts),
            counts=counts,
            draft_limits=launched.limits,
            new_rows=tuple(builder.new_rows),
            changes=tuple(builder.changes),
            freed_rows=tuple(self._running_set.freed_rows),
            forks=tuple(self._running_set.forks),
            copies=self._tables.take_copies(),
            transfers=transfers,
            lookups=lookups,
            cancelled=cancelled,
        )
        if self.guides is not None:
            self.guides.started(plan.new_rows)
        self._running_set.freed_rows.clear()
        self._running_set.forks.clear()
        self._in_flight.launch(launched)
        self.step += 1
        return plan

    def _check_not_frozen(self) -> None:
        """With no plan in flight who came first can always go on: admission made sure that it fits alone."""
        num_running, num_waiting = len(self._running_set.running), len(self._waiting_queue)
        held = 0 if self.guides is None else self.guides.num_held  # suspects among them keep others waiting
        if not self._in_flight and not held and (num_running or num_waiting):
            raise SchedulerFrozen(f"{num_running} sequences run, {num_waiting} wait, and nothing was planned")
