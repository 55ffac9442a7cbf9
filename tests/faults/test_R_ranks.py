"""Rows of the fault table for ranks: processes that share a model. No client may notice that one of them dies."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm import ConfigError, Engine
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.processes import alive
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually

pytestmark = pytest.mark.anyio

RANKS: dict[str, Any] = SETTINGS | {"tensor_parallel_size": 2, "num_threads": 1, "spare_worker": False}
STREAMS, LENGTH = 32, 60
GUIDE = StructuredOutputsParams(regex="([a-z]{9} ){12}[xyz]{20}")
GONE_SECONDS = 2.0


def prompt(number: int) -> list[int]:
    return [40 + number, 41, 42 + number % 7]


def sampling(number: int) -> dict[str, Any]:
    """Greedy, drawn with a seed, guided, and two answers, by turns."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": number},
        {"temperature": 0.0, "structured_outputs": GUIDE},
        {"temperature": 1.0, "seed": number, "n": 2},
    )
    return kinds[number % 4] | {"max_tokens": LENGTH, "ignore_eos": True}


async def answers(engine: Engine, started: Callable[[int], None] = lambda _: None) -> dict[int, Any]:
    """The tokens of all streams, side by side. started: called with a stream's number at its first token."""
    found: dict[int, Any] = {}

    async def read(number: int) -> None:
        tokens: dict[int, list[int]] = {}
        async with engine.stream(prompt(number), **sampling(number)) as stream:
            async for delta in stream:
                tokens.setdefault(delta.index, []).extend(delta.token_ids)
                started(number)
        found[number] = tokens

    async with anyio.create_task_group() as group:
        for number in range(STREAMS):
            group.start_soon(read, number)
    return found


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> dict[int, Any]:
    """The tokens of every stream, of one process."""

    async def run() -> dict[int, Any]:
        async with Engine(checkpoint, **SETTINGS) as engine:
            return await answers(engine)

    return anyio.run(run)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_R_a_killed_rank_costs_no_stream_a_token(checkpoint: Path, solo: dict[int, Any], rank: int) -> None:
    async with Engine(checkpoint, **RANKS) as engine:
        pids, begun = engine.snapshot().rank_pids, set[int]()
        assert len(pids) == 2
        found: list[dict[int, Any]] = []

        async def read() -> None:
            found.append(await answers(engine, begun.add))

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await eventually(lambda: len(begun) == STREAMS, SPARE_SECONDS)
            os.kill(pids[rank], signal.SIGKILL)
        assert found == [solo]
        successors = engine.snapshot().rank_pids
        assert len(successors) == 2
        assert not set(successors) & set(pids)
        assert alive({*pids, *successors}) == set(successors)
    await eventually(lambda: not alive(set(successors)), GONE_SECONDS)


async def test_R_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size 3 does not divide .* tensor parallel 1, 2") as caught:
        async with Engine(checkpoint, **RANKS | {"tensor_parallel_size": 3}):
            pass
    assert caught.value.param == "tensor_parallel_size"


async def test_R_ranks_need_processes(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="^worker_process must not be off with tensor_parallel_size above 1"):
        async with Engine(checkpoint, **RANKS | {"worker_process": False}):
            pass
