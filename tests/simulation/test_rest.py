"""Seeds in which the engine is paused and put to sleep again and again, under the faults of all other seeds.

Whoever was inside goes on with the right tokens, the watchdog leaves a resting engine alone, and everything drains.
"""

from collections import Counter
from random import Random
from typing import Any

import anyio
import pytest
import simulator.world as simulated
from simulator.extras import draw_extended
from simulator.ports import FaultyWorker
from simulator.runner import _seeded_schedule, _silence
from simulator.world import World
from trio.testing import MockClock

from troupellm.protocol.errors import Conflict, TroupeError
from troupellm.protocol.rest import SleepWorker, WakeWorker, WorkerCommand, WorkerReport
from troupellm.protocol.worker import ProgressSink, StepPlan, Ticket

SEEDS = 80


class SleepyWorker(FaultyWorker):
    """Its memory is gone after a sleep, and it takes no plan in it."""

    asleep = False

    def command(self, command: WorkerCommand, progress: ProgressSink) -> WorkerReport:
        if isinstance(command, SleepWorker):
            self.reset()
            self.asleep = True
        assert isinstance(command, SleepWorker | WakeWorker)
        if isinstance(command, WakeWorker):
            self.asleep = False
        worker: Any = self._worker
        return WorkerReport(ready=None if self.asleep else worker._ready)

    def launch(self, plan: StepPlan) -> Ticket:
        if self.asleep:
            raise RuntimeError("a plan came to a sleeping worker")
        return super().launch(plan)


class RestingWorld(World):
    """`rests` counts what was done, by kind."""

    def __init__(self, scenario: Any) -> None:
        super().__init__(scenario, tracing=False)
        self.rests: Counter[str] = Counter()
        self._draw = Random(scenario.seed)

    def fail(self, what: str) -> None:
        if not what.endswith("failed with asleep: the engine sleeps"):  # who does not wait is refused meanwhile
            super().fail(what)

    async def _pause(self) -> None:
        """The pause of other seeds has its place in the rests of these."""

    async def _serve(self, clients: Any) -> None:
        self.group.start_soon(self._rest_and_rise)
        await super()._serve(clients)

    async def _rest_and_rise(self) -> None:
        """Until the calm, in which nobody rests."""
        rest = self.system.rest
        async with anyio.create_task_group() as group:
            group.start_soon(self._until_calm, group.cancel_scope)
            while True:
                await anyio.sleep(self._draw.uniform(0.0, 1.5))
                kind = self._draw.choice(("pause", "sleep-1", "sleep-2", "sleep-0"))
                mode = self._draw.choice(("keep", "keep", "wait"))
                try:
                    if kind == "pause":
                        await rest.pause(mode)
                    else:
                        await rest.sleep(int(kind[-1]), mode)
                    self.rests[f"{kind} {mode}"] += 1
                    await anyio.sleep(self._draw.choice((0.0, 0.1, 8.0)))  # longer than the watchdog's patience
                    await self._rise(kind)
                except Conflict:
                    self.fail("nobody else rests or rises here")
                except TroupeError:
                    return  # the engine has ended, as it may under these faults

    async def _rise(self, kind: str) -> None:
        if kind == "pause":
            self.system.rest.resume()
        else:
            await self.system.rest.wake()

    async def _until_calm(self, scope: anyio.CancelScope) -> None:
        await self.calm.wait()
        rest = self.system.rest
        scope.cancel()
        with anyio.CancelScope(shield=True):
            try:
                await rest.wake()
                rest.resume()
            except TroupeError:
                return


def run(seed: int) -> tuple[list[str], Counter[str]]:
    worlds: list[RestingWorld] = []

    async def main() -> Any:
        worlds.append(RestingWorld(draw_extended(seed)))
        return await worlds[0].run()

    with _seeded_schedule(seed), _silence():
        verdict = anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
    return [f"seed {seed}: {failure}" for failure in verdict.failures], worlds[0].rests


def search(seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    monkeypatch.setattr(simulated, "FaultyWorker", SleepyWorker)
    rests: Counter[str] = Counter()
    failures: list[str] = []
    for seed in seeds:
        scenario = draw_extended(seed)
        if scenario.pressure.process or scenario.pressure.torch:
            continue
        found, done = run(seed)
        failures += found
        rests += done
    assert not failures, "\n".join(failures[:10])
    return rests


def test_an_engine_that_rests_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rests = search(range(SEEDS), monkeypatch)
    assert len(rests) == 8, rests
    assert min(rests.values()) >= 1, rests


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_thousand_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert min(search(range(3000), monkeypatch).values()) > 50
