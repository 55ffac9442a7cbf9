"""`bench overload`: when its recovery is timed, and what clients do who are refused."""

import argparse
import math
from typing import Any, Self

import anyio
import pytest

from troupellm.load_tests.bench import overload as command
from troupellm.load_tests.bench.overload import Outcome, _Load
from troupellm.protocol.errors import EngineOverloaded

REQUESTS = 4


class Answer:
    """One piece, which comes when the engine is free."""

    def __init__(self, free: anyio.Event) -> None:
        self._free, self._over = free, False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        if self._over:
            raise StopAsyncIteration
        self._over = True
        await self._free.wait()
        return "piece"


class Engine:
    """Becomes free once a request comes behind the whole load."""

    def __init__(self) -> None:
        self.asked, self._free = 0, anyio.Event()

    def stream(self, *_: Any, **__: Any) -> Answer:
        self.asked += 1
        if self.asked > REQUESTS:
            self._free.set()
        return Answer(self._free)


def test_recovery_is_timed_while_the_load_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "WARM_UP", 0.0)
    args = argparse.Namespace(output_len=1, max_num_seqs=1, max_num_queued_reqs=1, ttft_ms=1000.0)

    async def main() -> tuple[Engine, Outcome]:
        engine = Engine()
        with anyio.fail_after(60.0):
            return engine, await _Load(engine, args).open_loop(64.0, REQUESTS / 64.0, usual=math.inf)

    engine, outcome = anyio.run(main)
    assert engine.asked == REQUESTS + 1
    assert len(outcome.first_token) == REQUESTS
    assert outcome.recovered > 0.0


class Full:
    """Refuses at once, without giving way to anybody."""

    def __init__(self) -> None:
        self.asked = 0

    def stream(self, *_: Any, **__: Any) -> Answer:
        self.asked += 1
        raise EngineOverloaded("full")


def test_clients_that_are_refused_leave_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "WARM_UP", 0.0)
    monkeypatch.setattr(command, "REFUSED_PAUSE", 0.5)
    args = argparse.Namespace(output_len=1, max_num_seqs=2, max_num_queued_reqs=0, ttft_ms=1000.0)

    async def main() -> tuple[Full, Outcome]:
        engine = Full()
        return engine, await _Load(engine, args).closed_loop(1.0)

    engine, outcome = anyio.run(main)
    assert 0 < engine.asked == len(outcome.refusals) <= 2 * 3
