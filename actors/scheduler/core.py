"""The scheduler's thinking: requests in, plans out, results in, outputs out. No await, no clock, no channel.

Counting: `num_computed` of a sequence advances when a plan names it, its `tokens` when the plan has come back. With two
plans in flight a decode row is planned again while its last token exists on the device only.
"""

from collections.abc import Callable

import msgspec

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.kv_cache.events import KVEventLog
from troupellm.actors.scheduler.adapter_gate import make_adapter_gate
from troupellm.actors.scheduler.adapter_slots import AdapterSlots
from troupellm.actors.scheduler.encoders import Encoders
from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.guide_gate import GuideGate
from troupellm.actors.scheduler.kv_offload import make_offload
from troupellm.actors.scheduler.leases import Leases
from troupellm.actors.scheduler.open_requests import OpenRequests
from troupellm.actors.scheduler.pause import PauseControl
from troupellm.actors.scheduler.planner import Planner
from troupellm.actors.scheduler.plans import BrokenResult, PlansInFlight
from troupellm.actors.scheduler.quarantine import Quarantine
from troupellm.actors.scheduler.replay import Replay
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.scheduler.speculative_rows import make_speculative_rows
from troupellm.actors.scheduler.step_budget import PrefillBudget
from troupellm.actors.scheduler.submissions import Deadlines, EarlyAborts, find_refusal, make_request, owner_of
from troupellm.actors.scheduler.take_result import Updates
from troupellm.actors.scheduler.waiting_queue import WaitingQueue
from troupellm.actors.sequences.sequence import Event, State
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.kv_hints import DEFAULT_LEASES, LeaseConfig
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import QueueTimeout, RequestAborted, TroupeError
from troupellm.protocol.messages.guide import BuildGuide
from troupellm.protocol.messages.metrics import RequestStats, StepStats
from troupellm.protocol.messages.output import StepOutput
from troupellm.protocol.messages.scheduler import AdapterLoaded, GuideBuilt, SubmitRequest, WorkerLost
from troupellm.protocol.messages.snapshot import SchedulerSnapshot
from troupellm.protocol.messages.worker import StepPlan, StepResult, WorkerReady

_LASTING = ("vocab_width", "block_size", "groups", "fingerprint")
"""Fields of `WorkerReady` that must be equal after a restart."""


class SchedulerCore:
    """Owns the block pools and the state of every request between its submission and its `RequestClosed`."""

    def __init__(
        self,
        config: SchedulerConfig,
        ready: WorkerReady,
        *,
        enable_prefix_caching: bool,
        hash_key: bytes,
        engine_epoch: int = 0,
        speculative: SpeculativeConfig | None = None,
        kv_events: KVEventLog | None = None,
        offload: OffloadConfig | None = None,
        leases: LeaseConfig = DEFAULT_LEASES,
        builds_guides: bool = False,
        lora: LoraConfig | None = None,
    ) -> None:
        """
        Args:
            speculative: how drafts are to be made, by a worker that verifies them.
            offload: of the tiers behind the device, where the worker has any.
            leases: of KV blocks that clients will come back for.
            kv_events: hears what can be found in the prefix cache; the driver flushes it.
            lora: of adapters, which the driver has the worker read: `take_adapter_asks`, `adapter_loaded`.
            builds_guides: the driver has the worker build the programs of `take_builds`, and calls `guide_built`.
        """
        self.kv_events = kv_events
        self._config, self._ready, self._speculative = config, ready, speculative
        self._tables = BlockTables(
            ready.groups, ready.num_blocks, ready.block_size, caching=enable_prefix_caching, secret=hash_key,
            events=None if kv_events is None else kv_events.of("device"), state_slots=ready.state_slots,
            state_interval=config.state_snapshot_interval,
        )  # fmt: skip
        self._tenants = {tenant.name: tenant for tenant in config.tenants}
        fair_share = FairShare({tenant.name: tenant.weight for tenant in config.tenants})
        self._waiting = WaitingQueue(fair_share)
        budget = self._prefill_budget = PrefillBudget(config, ready)
        self._in_flight = PlansInFlight(config.plans_in_flight)
        slots = AdapterSlots(0 if lora is None else min(ready.max_loras, lora.num_slots))
        self._running_set = RunningSet(self._tables, self._waiting, self._in_flight, fair_share, slots)
        self._offload = self._tables.tiers = make_offload(
            offload, ready, self._tables, self._running_set, self._waiting, budget.seconds_per_token, kv_events
        )
        self._open = OpenRequests(self._running_set, self._waiting)
        self.leases = self._open.leases = Leases(leases, self._tables, self._offload, ready.host_slots)
        self._leased = self._tables.pool.leased
        self.pause_control = PauseControl(self._open, self._running_set, self._in_flight, self._offload)
        self._quarantine = Quarantine()
        self._planner = Planner(
            config,
            self._tables,
            self._waiting,
            self._in_flight,
            self._running_set,
            fair_share,
            self._prefill_budget,
            self._quarantine,
            engine_epoch,
            whole_prompts=ready.whole_prompts,
            offload=self._offload,
        )
        self._planner.speculative_rows = make_speculative_rows(speculative, ready, config, self._tables)
        self.guides = self._planner.guides = GuideGate(self._running_set, self._open) if builds_guides else None
        self.adapters = self._planner.adapters = make_adapter_gate(
            lora, self._running_set, self._in_flight, fair_share, self._open.end_request
        )
        self.encoders = self._planner.encoders = None if ready.media is None else Encoders(ready.media)
        most = config.max_num_batched_tokens
        self._replay = Replay(
            self._open, self._running_set, self._tables, self._in_flight, self._planner, self._quarantine, most
        )
        self._updates = Updates(self._open, self._running_set, self._tables, ready, fair_share, self.guides)
        self._deadlines = Deadlines()
        self._early_aborts = EarlyAborts()
        self._trial_waits = False
        """Other suspects have their turn as soon as the plans in flight are back."""
        self._num_submitted = self._num_sleeps = 0

    @property
    def num_dropped_results(self) -> int:
        """Row results that named nothing alive."""
        return self._updates.token_appender.num_dropped

    @property
    def engine_epoch(self) -> int:
        """How often the worker was lost."""
        return self._planner.engine_epoch

    @property
    def next_deadline(self) -> float | None:
        """When `plan` is due though nothing happens: a request may be late, or an adapter has waited long enough."""
        waits = len(self._in_flight) or self._replay.reason is not None or self.pause_control.halted
        review = None if self.adapters is None or waits else self.adapters.next_review
        return min((time for time in (self._deadlines.next, review) if time is not None), default=None)

    def submit(self, message: SubmitRequest) -> None:
        """Accept a request, or close it at once with the error that says why it can never run."""
        self._open.now = max(self._open.now, message.arrival)
        refusal: TroupeError | None
        if self._early_aborts.take(message.request):
            refusal = _aborted()
        else:
            refusal = find_refusal(message, self._ready, self._config)
        if refusal is not None:
            self._open.refuse(message, refusal)
            return
        self._num_submitted += 1
        request = make_request(message, self._ready, self._config, self._tenants, self._tables, self._num_submitted)
        if self._planner.speculative_rows is not None:
            request.owner = owner_of(message)
        self._open.open(request)
        if self.pause_control.finishing:
            self.pause_control.hold_back(request)
        if message.deadline is not None:
            self._deadlines.add(message.deadline, message.request, self._open.requests, len(self._open.requests))

    def abort(self, request: int) -> None:
        """End a request for its owner, at once; plans in flight that name it still hold its blocks. Idempotent.

        One that is not here is closed too: the output actor may have opened it. It may still be on its way in.
        """
        found = self._open.requests.get(request)
        if found is not None:
            self._open.end_request(found, _aborted())
            return
        if any(closed.request == request for closed in self._open.closed):
            return  # its end is about to be told
        self._open.close_unknown(request, _aborted())
        self._early_aborts.add(request)

    def stop_string_met(self, row: int) -> None:
        """End a sequence whose text met a stop string; its end has been shown already. Idempotent."""
        sequence = self._open.sequences.get(row)
        if sequence is not None and not sequence.ended and not sequence.is_beam:
            sequence.request.reason = "stop"
            self._open.end(sequence, Event.STOP)

    def pause(self, request: int) -> None:
        """See `OpenRequests.pause`."""
        self._open.pause(request)

    def resume(self, request: int) -> None:
        self._open.resume(request)

    def take_builds(self) -> list[BuildGuide]:
        """Guides that the worker is to build, and that `guide_built` is told of."""
        if self.guides is None or not (self.guides.urgent or self.guides.queue.lines):
            return []
        return [msgspec.structs.replace(ask, engine_epoch=self.engine_epoch) for ask in self.guides.take_asks()]

    def guide_built(self, built: GuideBuilt) -> None:
        """The sequences that waited for a guide go on, or end where it took too long."""
        if self.guides is None or built.engine_epoch != self.engine_epoch or built.outcome == "gone":
            return  # the next worker is asked again
        self.guides.answer(built)

    def adapter_loaded(self, loaded: AdapterLoaded) -> None:
        """The worker has read an adapter, or cannot."""
        if self.adapters is not None:
            self.adapters.answer(loaded, lost=loaded.engine_epoch != self.engine_epoch)

    def go_on(self) -> None:
        """After a halt."""
        for request in self.pause_control.end():
            self.resume(request)

    def reset_prefix_cache(self, *, external: bool = False, done: Callable[[bool], None] = lambda ok: None) -> None:
        """See `ResetPrefixCache`."""
        self._tables.reset()
        if self._offload is None:
            done(True)
        else:
            self._offload.reset(done, external=external)
            if self._replay.reason is not None or self.pause_control.halted:  # before anything else
                self._offload.answer_resets(self._replay.reason is None)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None: nothing to compute, or as many plans in flight as allowed.

        Raises:
            SchedulerFrozen: work could run but was not planned; a bug of ours.
        """
        self._open.now = now
        self._leased.now = now
        if self._leased.cached:
            self._tables.pool.end_expired()
        if self._deadlines.next is not None and self._deadlines.next <= now:
            self._expire(now)
        if self._in_flight.full or self._replay.reason is not None or self.pause_control.halted:
            return None
        if self._quarantine.groups and not self._hold_trial():
            return None
        return self._planner.plan(now)

    def update(self, result: StepResult, now: float) -> StepOutput:
        """Take in what a plan gave; what is to be shown of it.

        Raises:
            BrokenResult: the result is nonsense or overtook another: a worker fault, and nothing of it was taken in.
                Nothing more is planned until `lose_worker` and `worker_restarted`.
        """
        self._open.now = now
        current = result.engine_epoch == self.engine_epoch and self._replay.reason is None
        try:
            launched = self._in_flight.find(result.step) if current else None
            aligned = None if launched is None else self._updates.check(launched, result)
        except BrokenResult as error:
            self._replay.distrust(str(error))
            raise
        if launched is not None and aligned is not None:
            self._updates.take_reports(result)
            if self._offload is not None:  # before the flight lands, since ended or preempted sequences disturb it
                self._offload.update(result, now)
                self._offload.fail_unloaded(self._open.end_request)
            self._in_flight.land(launched)
            if not launched.rows:
                self._open.release_returned()
                return self._open.take(result.step) or StepOutput(step=result.step)
            self._prefill_budget.learn(
                prefill_tokens=launched.prefill_tokens,
                decode_rows=len(launched.rows) - len(launched.prefills),
                planned_at=launched.planned_at,
                now=now,
            )
            return self._updates.apply(launched, result, aligned, now)
        self._updates.token_appender.num_dropped += len(result.rows)
        return self._open.take(result.step) or StepOutput(step=result.step)

    def lose_worker(self, lost: WorkerLost, *, keeps_host: bool = False) -> None:
        """The plans in flight and the worker's memory are gone: who was running waits to be computed again."""
        self._updates.forget_worker()
        if self.guides is not None:
            self.guides.forget()
        if self.adapters is not None:
            self.adapters.forget()
        if self._offload is not None:
            self._offload.forget(keep_host=keeps_host)
        self._replay.lose(lost)

    def worker_sleeps(self, *, keeps_host: bool = False) -> None:
        """The worker's memory was given back, except the host tier's if `keeps_host`; no request is blamed."""
        self._num_sleeps += 1
        self.lose_worker(WorkerLost("the engine sleeps", fault=False), keeps_host=keeps_host)

    def worker_restarted(self, ready: WorkerReady) -> None:
        """Plan again.

        Raises:
            ValueError: the new worker serves another model.
        """
        if any(getattr(ready, name) != getattr(self._ready, name) for name in _LASTING):
            raise ValueError("the restarted worker has another model, block size or cache layout than before")
        self._ready = ready
        self._planner.speculative_rows = make_speculative_rows(self._speculative, ready, self._config, self._tables)
        if self._offload is not None:
            self._offload.renew(ready)
        self._replay.resume(ready)
        if self.guides is not None:
            self.guides.renew()

    def take_output(self) -> StepOutput | None:
        """Ends that no step brought: aborts, refusals, deadlines."""
        return self._open.take(self._in_flight.last_returned)

    def take_stats(self) -> list[StepStats | RequestStats]:
        """Statistics since the last call, for the metrics sink."""
        stats, self._open.stats = self._open.stats, []
        return stats

    def snapshot(self) -> SchedulerSnapshot:
        pool = self._tables.pool
        running_set = self._running_set
        running, paused = len(running_set.running), len(running_set.paused) + len(running_set.held)
        held = self._planner.num_held
        paused -= held
        return SchedulerSnapshot(
            waiting=max(0, len(self._open.sequences) - running - paused - len(running_set.ending)),
            held=held,
            running=running,
            paused=paused,
            waiting_tokens=self._waiting.num_tokens,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            cache_groups=pool.show_groups(self._ready.groups),
            steps=self._planner.step,
            preemptions=running_set.num_preemptions,
            tokens_generated=self._updates.num_tokens,
            drafts=self._updates.drafting.total.steps,
            draft_tokens=self._updates.drafting.total.drafted,
            accepted_draft_tokens=self._updates.drafting.total.accepted,
            proposer=self._updates.proposer.snapshot() if self._ready.most_drafts else None,
            prefix_queries=self._tables.num_queried_tokens,
            prefix_hits=self._tables.num_hit_tokens,
            prefix_evictions=self._tables.num_evicted,
            states=None if self._tables.states is None else self._tables.states.snapshot(self._ready.state_bytes),
            plans_in_flight=len(self._in_flight),
            halted=self.pause_control.halted,
            worker_losses=self.engine_epoch - self._num_sleeps,
            replays=self._replay.num_replayed,
            quarantined=len(self._quarantine),
            blamed=self._quarantine.num_blamed,
            dropped_results=self._updates.token_appender.num_dropped,
            offload=None if self._offload is None else self._offload.snapshot(),
            leases=self.leases.snapshot(),
            adapters=None if self.adapters is None else self.adapters.snapshot(list(self._open.sequences.values())),
            encoders=None if self.encoders is None else self.encoders.snapshot(),
            graphs=self._updates.graphs,
        )

    def assert_invariants(self) -> None:
        """For tests, after any call: every block and every sequence is accounted for."""
        self._running_set.assert_invariants()
        self._open.assert_invariants(self._in_flight)
        self.leases.assert_invariants()
        if self._offload is not None:
            self._offload.assert_invariants()
        if self.adapters is not None:
            self.adapters.assert_invariants()
        for sequence in self._open.sequences.values():
            waits = sequence.state in (State.WAITING, State.PREEMPTED)
            released = sequence.request.prompt_computed or sequence is sequence.request.sequences[0]
            assert (sequence in self._waiting) == (waits and released), "queue and states disagree"
            assert not sequence.request.paused or sequence.state not in (State.RUNNING, State.WAITING), "not paused"
            assert len(sequence.tokens) <= sequence.limit, "a sequence outgrew its limit"
        assert len(self._in_flight) <= self._in_flight.capacity, "more plans in flight than credits"

    def _hold_trial(self) -> bool:
        """Make way for the suspects whose turn it is; False while a plan of others is in flight."""
        if self._quarantine.review():
            self._trial_waits = True
        if self._trial_waits and len(self._in_flight):
            return False
        if self._trial_waits and self._quarantine.members is not None:
            self._running_set.make_way(self._quarantine.members)
        self._trial_waits = False
        return True

    def _expire(self, now: float) -> None:
        """Close requests that still wait after their deadline."""
        for number in self._deadlines.passed(now):
            request = self._open.requests.get(number)
            if request is not None and request.scheduled is None:
                self._open.end_request(request, QueueTimeout("the deadline passed before the request began"))


def _aborted() -> RequestAborted:
    return RequestAborted("the request was aborted")
