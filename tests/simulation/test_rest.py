"""Seeds in which the engine is paused and put to sleep again and again, under the faults of all other seeds.

Open requests go on with the right tokens, the watchdog leaves a resting engine alone, and everything drains.
In most of them several operators know nothing of one another, raise what others have laid down, and leave meanwhile.
"""

from collections import Counter
from random import Random
from typing import Any

import anyio
import pytest
from simulator.multipliers import draw_whole
from simulator.runner import _seeded_schedule, _silence
from simulator.world import World
from trio.testing import MockClock

from troupellm.protocol.errors import Conflict, TroupeError
from troupellm.protocol.messages.sleep import StopProfile

SEEDS = 60


class RestingWorld(World):
    """`rests` counts what was done, by kind, and `conflicts` what was refused."""

    def __init__(self, scenario: Any) -> None:
        super().__init__(scenario, tracing=False)
        self.rests: Counter[str] = Counter()
        self.conflicts: Counter[str] = Counter()
        self._draw = Random(scenario.seed)
        self._operators = 1 + scenario.seed % 4
        self._rises = 0
        """Calls that may have ended a rest."""

    def fail(self, what: str) -> None:
        if not what.endswith("failed with asleep: the engine sleeps"):  # who does not wait is refused meanwhile
            super().fail(what)

    def nap(self) -> None:
        """There are rests enough."""

    async def _pause(self) -> None:
        """The pause of other seeds has its place in the rests of these."""

    async def _serve(self, clients: Any) -> None:
        self.group.start_soon(self._rest_until_calm)
        await super()._serve(clients)

    async def _rest_until_calm(self) -> None:
        """Rest until the calm begins."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._until_calm, group.cancel_scope)
            for _ in range(self._operators):
                group.start_soon(self._rest_and_rise)

    async def _rest_and_rise(self) -> None:
        while True:
            await anyio.sleep(self._draw.uniform(0.0, 1.5 if self._operators == 1 else 0.1))
            kind = self._draw.choice(("pause", "sleep-1", "sleep-2", "sleep-0"))
            mode = self._draw.choice(("keep", "keep", "wait"))
            try:
                if self._operators > 1 and self._draw.random() < 0.4:
                    await self._meddle()
                    continue
                await self._rest(kind, mode)
                await self._rise(kind)
            except Conflict as conflict:
                self.conflicts[conflict.code] += 1
                if self._operators == 1:
                    self.fail("nobody else rests or rises here")
            except TroupeError:
                return  # the engine has ended, as it may under these faults

    async def _rest(self, kind: str, mode: Any) -> None:
        """An engine said to stand still does so until it is woken, and no request that it waited for is left."""
        rest, rises = self.system.sleep_control, self._rises
        patience = None if self._operators == 1 else self._draw.choice((None, None, 0.0, 0.05, 0.5))
        with anyio.move_on_after(patience):
            await (rest.pause(mode) if kind == "pause" else rest.sleep(int(kind[-1]), mode))
            self.rests[f"{kind} {mode}"] += 1
            if mode == "wait" and rises == self._rises and self._anybody_began():
                self.fail("a wait is over, and somebody has not finished")
            rises, steps = self._rises, self._planned()
            await anyio.sleep(self._draw.choice((0.0, 0.1, 8.0)))  # longer than the watchdog's patience
            if rises == self._rises and self._planned() not in (steps, None):
                self.fail(f"a step was planned after {kind} {mode}")

    async def _meddle(self) -> None:
        """An operation that may come at any time."""
        rest = self.system.sleep_control
        match self._draw.randrange(3):
            case 0:
                await self._rise("pause")
            case 1:
                await self._rise("sleep", self._draw.choice(("weights", "kv_cache", "scheduling")))
            case 2:
                await rest.command(StopProfile())

    def _planned(self) -> int | None:
        """Steps so far; None once the engine has ended."""
        return self.core.snapshot().steps if self.core is not None and self.system.failure is None else None

    def _anybody_began(self) -> bool:
        requests = [] if self.core is None else self.core._open.requests.values()
        return any(
            len(sequence.tokens) > request.num_prompt_tokens for request in requests for sequence in request.sequences
        )

    async def _rise(self, kind: str, *tags: Any) -> None:
        try:
            if kind == "pause":
                self.system.sleep_control.resume()
            else:
                await self.system.sleep_control.wake(tags or None)
        finally:
            self._rises += 1

    async def _until_calm(self, scope: anyio.CancelScope) -> None:
        await self.calm.wait()
        rest = self.system.sleep_control
        scope.cancel()
        with anyio.CancelScope(shield=True):
            try:
                await rest.wake()
                rest.resume()
            except TroupeError:
                return


def run(seed: int) -> tuple[list[str], Counter[str], Counter[str]]:
    worlds: list[RestingWorld] = []

    async def main() -> Any:
        worlds.append(RestingWorld(draw_whole(seed)))
        return await worlds[0].run()

    with _seeded_schedule(seed), _silence():
        verdict = anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
    return [f"seed {seed}: {failure}" for failure in verdict.failures], worlds[0].rests, worlds[0].conflicts


def search(seeds: range) -> tuple[Counter[str], Counter[str]]:
    rests: Counter[str] = Counter()
    conflicts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in seeds:
        scenario = draw_whole(seed)
        if scenario.pressure.process or scenario.pressure.torch:
            continue
        found, done, refused = run(seed)
        failures += found
        rests += done
        conflicts += refused
    assert not failures, "\n".join(failures[:10])
    return rests, conflicts


def test_an_engine_that_rests_again_and_again() -> None:
    rests, conflicts = search(range(SEEDS))
    assert len(rests) == 8, rests
    assert min(rests.values()) >= 1, rests
    assert conflicts.keys() == {"asleep", "pausing", "resumed", "standing_still"}, conflicts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_thousand_of_them() -> None:
    assert min(search(range(3000))[0].values()) > 50
