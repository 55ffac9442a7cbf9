"""One seed's universe: the real actors and a simulated outside, in two phases: chaos, and a calm that must drain."""

from contextlib import suppress
from random import Random
from typing import Any

import anyio

from simulator.adapted import QuietPool, adapter_sources, reload_adapters
from simulator.child import SimProcesses
from simulator.clients import Client
from simulator.faults import CRASHES
from simulator.fronts import Fronts
from simulator.history import Record, Verdict, check_accounts, may_end
from simulator.invariants import check_admission, check_baseline, waiting_for
from simulator.model import Language, chat_template, oracle_language
from simulator.oracle_ready import worker_ready
from simulator.oracle_worker import OracleWorker
from simulator.ports import FaultyWorker, Pace, SimClock, SimCompiler, SimPool, SimRandomness, SimThread
from simulator.taps import observed
from simulator.tiers import SimTiers
from simulator.watch import EXPECTED, Watch
from simulator.workload import Scenario
from troupellm.actors.engine.system import EngineParts, System
from troupellm.actors.worker.process_host import ProcessWorker
from troupellm.actors.worker.thread_host import ThreadWorker, WorkerHost
from troupellm.protocol.errors import EngineStopped, TroupeError
from troupellm.protocol.messages.scheduler import ResetPrefixCache
from troupellm.protocol.messages.snapshot import LeaseSnapshot
from troupellm.protocol.params.sampling import Limits

CHAOS_SECONDS = 30.0
CALM_SECONDS = 60.0
"""Virtual seconds within which everybody is served once the faults are over."""
SETTLE_SECONDS = 10.0
STOP_SECONDS = 20.0
DRAIN_SECONDS = 1.0
_MOST_RECOMPUTED = 40
"""Computed positions per wanted one, at most."""


class World(Watch):
    def __init__(self, scenario: Scenario, *, tracing: bool) -> None:
        super().__init__(scenario, tracing=tracing)
        self.language = _language(scenario)
        self.clock = SimClock()
        self.records = [Record(ask) for ask in scenario.asks]
        self.calm = anyio.Event()
        self.ready = worker_ready(scenario, self.language)
        self.limits = Limits(vocab_width=self.language.width, max_model_len=self.ready.max_model_len)
        self.worker: Any = self._build_worker()
        self.fronts = Fronts(self, scenario.pressure.fronts)
        self.clients: list[Client] = []
        self.worker_host: ProcessWorker | None = None
        self.processes: SimProcesses | None = None

    async def run(self) -> Verdict:
        with self.scope:
            async with anyio.create_task_group() as self.group:
                with observed(self):
                    await self._live()
                self.group.cancel_scope.cancel()
        return self._verdict()

    async def _live(self) -> None:
        self.system = System(self._parts(await self._worker_host()))
        await self.group.start(self.system.run)
        if self.scenario.pressure.loras:
            self.group.start_soon(reload_adapters, self)
        if self.fronts.count:
            self.group.start_soon(self.fronts.run)
        clients = self.clients = [Client(self, record) for record in self.records]
        if self.injector.strike("engine", "drain"):
            self.group.start_soon(self._drain)
        if self.injector.strike("engine", "pause"):
            self.group.start_soon(self._pause)
        if self.injector.strike("engine", "cache_reset"):
            self.group.start_soon(self._reset_cache)
        if self.injector.strike("engine", "wall_jump"):
            self.clock.offset += self.random.choice((-3600.0, 3600.0))
        await self._serve(clients)
        await self._settle()
        self._check_histories()
        await self._stop()
        await self._bury()

    async def _worker_host(self) -> WorkerHost:
        scenario, random, injector = self.scenario, self.random, self.injector
        ahead = scenario.pressure.ahead and not scenario.pressure.process
        worker = FaultyWorker(self.worker, random, injector, self.blame_row, ahead=ahead)
        pace = Pace(random, injector, scenario.pressure.step_seconds)
        start_soon = self.group.start_soon
        if not scenario.pressure.process:
            thread = SimThread(pace, start_soon, ahead=ahead)
            pool = QuietPool(random) if scenario.pressure.loras else None
            return ThreadWorker(worker, thread, self.ready, scenario.config.worker.step_deadline, pool)
        self.processes = SimProcesses(worker, self.ready, random, injector, pace, start_soon)
        spare = scenario.pressure.spare
        worker_host = self.worker_host = ProcessWorker(
            "sim", scenario.config, self.processes, lambda progress: None, spare=spare
        )
        injector.calm = True  # a model that cannot be loaded at first is no engine
        await worker_host.start()
        injector.calm = False
        return worker_host

    async def _bury(self) -> None:
        """9: no process is left."""
        if self.worker_host is not None:
            await self.worker_host.close()
            if self.processes is not None and self.processes.alive:
                self.fail(f"9: {len(self.processes.alive)} worker processes are left")

    async def _serve(self, clients: list[Client]) -> None:
        """Chaos until all who came in it have ended, or for so long; then a calm in which everybody must."""
        first = [client for client in clients if not client.ask.calm]
        over = anyio.Event()
        with anyio.CancelScope() as bound:
            async with anyio.create_task_group() as group:
                group.start_soon(self._all, first, over)
                with anyio.move_on_after(CHAOS_SECONDS):
                    await over.wait()
                self.injector.calm = True
                self.calm.set()
                self.note("calm")
                bound.deadline = anyio.current_time() + CALM_SECONDS
                for client in clients:
                    if client.ask.calm:
                        group.start_soon(client.run)
        if bound.cancelled_caught:
            self.fail("not everybody was served in the calm")

    async def _all(self, clients: list[Client], over: anyio.Event) -> None:
        async with anyio.create_task_group() as group:
            for client in clients:
                group.start_soon(client.run)
        over.set()

    async def _drain(self) -> None:
        await anyio.sleep(self.random.uniform(0.0, 1.0))
        self.note("drain")
        self.system.admission.close()
        if not await self.system.requests.wait_empty(DRAIN_SECONDS):
            self.system.requests.end_all(lambda: EngineStopped("the engine is shutting down"))

    async def _pause(self) -> None:
        """Everything stands still for a while; open requests are kept, or finish first, and no client notices."""
        await anyio.sleep(self.random.uniform(0.0, 0.5))
        mode = self.random.choice(("keep", "wait"))
        self.note("pause", mode)
        with suppress(TroupeError), anyio.move_on_after(self.random.choice((0.1, 5.0))):
            await self.system.sleep_control.pause(mode, clear_cache=self.random.random() < 0.5)
            self.note("paused")
            await anyio.sleep(self.random.uniform(0.0, 6.0))
        self.system.sleep_control.resume()
        self.note("resumed")

    async def _reset_cache(self) -> None:
        for _ in range(3):
            await anyio.sleep(self.random.uniform(0.0, 0.3))
            self.system.scheduler.control(ResetPrefixCache())

    # Operations that tiers call while transfers are under way: `tiers.Bystander`.

    def leave(self, transfer: int) -> None:
        for request in waiting_for(self.core, transfer):
            for client in self.clients:
                if client.request == request and not client.record.left:
                    self.note("client", client.ask.number, "leaves during transfer", transfer)
                    client.leave()

    def reset_cache(self) -> None:
        self.note("prefix cache reset during transfers")
        self.system.scheduler.control(ResetPrefixCache(external=self.random.random() < 0.5))

    def nap(self) -> None:
        self.group.start_soon(self._nap)

    async def _nap(self) -> None:
        levels = self.random.choice(((1,), (2,), (1, 2)))
        self.note("nap", levels)
        with suppress(TroupeError):
            for level in levels:
                await self.system.sleep_control.sleep(level, "keep")
            await anyio.sleep(self.random.choice((0.0, 0.1, 1.0)))
            await self.system.sleep_control.wake()
        self.note("nap is over")

    def _check_histories(self) -> None:
        for record in self.records:
            for wrong in record.check(self.language, self.scenario, self.injector, self.blamed):
                self.fail(f"client {record.ask.number}: {wrong}")
        failure = self.system.failure
        if failure is not None and not (isinstance(failure, EXPECTED) and may_end(self.injector)):
            self.fail(f"the engine failed: {failure!r}")

    async def _settle(self) -> None:
        """9: what plans in flight still held comes back, and who left is let go of."""
        core = self.core
        if core is None or self.system.failure is not None:
            return
        with anyio.move_on_after(SETTLE_SECONDS):
            while self._unsettled(core):  # noqa: ASYNC110 - plain numbers without change events
                await anyio.sleep(0.1)
        if self.system.failure is not None:
            return
        for wrong in (*check_baseline(core.snapshot()), *self.fronts.check()):
            self.fail(wrong)
        if len(self.system.requests):
            self.fail(f"9: {len(self.system.requests)} requests are open, and nobody waits for them")
        if self.open:
            self.fail(f"2: requests {sorted(self.open)} were never closed")
        self._check_accounts()
        useful = self.wanted + 1
        if self.worker.num_computed > _MOST_RECOMPUTED * useful:
            self.fail(f"7: {self.worker.num_computed} positions were computed for {useful} wanted ones")

    def _unsettled(self, core: Any) -> bool:
        on_the_way = self._lanes or self.system.metrics.depth or self.fronts.check()
        return bool(check_baseline(core.snapshot()) or len(self.system.requests) or self.open or on_the_way)

    def _check_accounts(self) -> None:
        """9: every request that the scheduler took in is in exactly one terminal counter, and no request holds a
        place."""
        system, store = self.system, self.system.store
        lost = system.metrics.snapshot().dropped + sum(self.injector.hits["metrics", kind] for kind in CRASHES)
        ended = sum(store.finished.values())
        if not self.submitted - lost <= ended <= self.submitted:
            self.fail(
                f"9: {self.submitted} requests were submitted, {ended} were counted at their end: {store.finished}"
            )
        for wrong in check_admission(system.admission):
            self.fail(wrong)
        records = {client.request: client.record for client in self.clients}
        for wrong in check_accounts(system.admission.quotas.snapshot(), self.used, records):
            self.fail(wrong)

    async def _stop(self) -> None:
        with anyio.move_on_after(STOP_SECONDS) as scope:
            await self.system.stop()
        if scope.cancelled_caught:
            self.fail("the system did not stop")
        if len(self.system.requests):
            self.fail("requests are open after the stop")

    def _parts(self, worker_host: WorkerHost) -> EngineParts:
        random = self.random
        return EngineParts(
            config=self.scenario.config,
            ready=self.ready,
            limits=self.limits,
            worker_host=worker_host,
            tokenizer=self.language.tokenizer,
            tables=self.language.tables,
            chat_template=chat_template(),
            compiler=SimCompiler(random),
            pool=SimPool(random, self.injector),
            clock=self.clock,
            randomness=SimRandomness(random),
            hash_key=b"a secret of the simulation",
            adapters=adapter_sources(random) if self.scenario.pressure.loras else None,
        )

    def _build_worker(self) -> Any:
        if self.scenario.pressure.torch:
            from simulator.torch_worker import TinyTorchWorker

            return TinyTorchWorker(self.ready)
        pressure = self.scenario.pressure
        worker = OracleWorker(self.ready, self.fail, Random(self.scenario.seed ^ 0xD4AF7), pressure.hit_rate)
        if pressure.loras:
            worker.adapters.most_host = self.scenario.config.lora.host_adapters
        if pressure.host_slots:
            random = Random(self.scenario.seed ^ 0x71E45)
            worker.tiers = SimTiers(worker, random, self.injector, pressure.outer, pressure.transfer_speed)
            worker.tiers.bystander = self
        return worker

    def _verdict(self) -> Verdict:
        leases = self.core.snapshot().leases if self.core else LeaseSnapshot()
        return Verdict(
            seed=self.scenario.seed,
            failures=tuple(self.failures),
            hits=dict(self.injector.hits),
            trace=tuple(self.trace or ()),
            virtual_seconds=self.clock.now() - self.begin,
            steps=self.steps,
            finished=sum(record.whole for record in self.records),
            preemptions=self.core.snapshot().preemptions if self.core else 0,
            accepted=0 if self.scenario.pressure.torch else self.worker.num_accepted,
            loads=self.worker.tiers.counts.get("load", 0) if self.scenario.pressure.host_slots else 0,
            leased=leases.leased_blocks + sum(leases.ends.values()),
            prefetched=leases.prefetched.get("loaded", 0),
        )


def _language(scenario: Scenario) -> Language:
    if scenario.pressure.torch:
        from simulator.torch_worker import torch_language

        return torch_language()
    return oracle_language()
