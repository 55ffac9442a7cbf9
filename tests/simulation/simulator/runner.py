"""Running seeds: each on a virtual clock of its own, under a schedule that the seed alone decides."""

import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import anyio
import trio._core._run as trio_run
from trio.testing import MockClock

from simulator.fronted import draw_seed
from simulator.history import Verdict
from simulator.workload import Scenario
from simulator.world import World


def run_seed(seed: int, *, tracing: bool = False) -> Verdict:
    return run_scenario(draw_seed(seed), tracing=tracing)


def run_seeds(seeds: Sequence[int]) -> tuple[list[Verdict], float]:
    """Several, and the processor's seconds that they took."""
    begin, verdicts = time.process_time(), []
    for seed in seeds:
        try:
            verdicts.append(run_seed(seed))
        except Exception as error:  # the simulation itself is broken
            error.add_note(f"seed {seed}")
            raise
    return verdicts, time.process_time() - begin


def digest(verdict: Verdict) -> int:
    """A checksum of everything that happened in a seed that was traced."""
    return zlib.crc32(repr(verdict.trace).encode())


def run_scenario(scenario: Scenario, *, tracing: bool = False) -> Verdict:
    async def main() -> Verdict:
        return await World(scenario, tracing=tracing).run()

    with _seeded_schedule(scenario.seed), _silence():
        return anyio.run(main, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})


@contextmanager
def _seeded_schedule(seed: int) -> Iterator[None]:
    """Trio sorts each batch of ready tasks and shuffles it with a generator of our own.

    The switch is private to trio and meant for its own property tests; a test of ours holds that it works.
    """
    module: Any = trio_run
    before = module._ALLOW_DETERMINISTIC_SCHEDULING, module._r
    module._ALLOW_DETERMINISTIC_SCHEDULING, module._r = True, Random(seed)
    try:
        yield
    finally:
        module._ALLOW_DETERMINISTIC_SCHEDULING, module._r = before


@contextmanager
def _silence() -> Iterator[None]:
    """Hide the engine's log about injected crashes, which would fill the screen."""
    logger = logging.getLogger("troupellm")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
