"""Replicas die and restart: streams end with the tokens of a solo run, and the fleet says what is missing.

The engine processes are tasks of the test's own event loop here; `test_R_replicas_server.py` has real ones.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from troupellm import Engine
from troupellm.actors.replicas.fleet import Fleet
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.kv_hints import KVHints
from troupellm.protocol.errors import ConfigError, EngineStopped, InvalidRequest, ModelLoadError, TroupeError
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.engines.inside import child_of
from troupellm.tests.support.servers.replica_tasks import replica_tasks
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually, server_config

pytestmark = pytest.mark.anyio

LENGTH = 160
STREAMS = 8
GUIDE = StructuredOutputsParams(regex="([a-z]{9} ){12}[xyz]{20}")


def prompt(number: int) -> list[int]:
    return [40 + number, 41, 42 + number % 7]


def sampling(number: int) -> dict[str, Any]:
    """Greedy, seeded, guided, two answers."""
    kind = number % 4
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": number} if kind else {"temperature": 0.0}
    if kind == 2:
        drawn["structured_outputs"] = GUIDE
    if kind == 3:
        drawn["n"] = 2
    return drawn | {"max_tokens": LENGTH, "ignore_eos": True}


def config(folder: Any, size: int = 2, **settings: Any) -> EngineConfig:
    given = SETTINGS | {"model": str(folder), "data_parallel_size": size, "worker_process": False, "max_num_seqs": 16}
    return EngineConfig.from_flat(given | {"kv_cache_memory_bytes": 16 * 2**20} | settings)


@asynccontextmanager
async def fleet_of(folder: Any, size: int = 2, **settings: Any) -> AsyncIterator[Fleet]:
    async with replica_tasks() as tasks, Fleet(config(folder, size, **settings), server_config(), tasks) as fleet:
        yield fleet


Answer = tuple[dict[int, tuple[int, ...]], str]


async def read(engine: Any, number: int, seen: dict[int, int] | None = None, **options: Any) -> Answer:
    """The tokens of each answer, and the text of the first."""
    tokens: dict[int, list[int]] = {}
    text = ""
    async with engine.stream(prompt(number), **sampling(number), **options) as stream:
        async for delta in stream:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            text += delta.text if delta.index == 0 else ""
            if seen is not None:
                seen[number] = seen.get(number, 0) + len(delta.token_ids)
    assert stream.usage.completion_tokens == sum(map(len, tokens.values()))
    assert stream.usage.prompt_tokens == 3
    return {index: tuple(ids) for index, ids in tokens.items()}, text


@pytest.fixture(scope="module")
def solo(checkpoint: Path) -> dict[int, Answer]:
    async def run() -> dict[int, Answer]:
        async with Engine(checkpoint, **SETTINGS | {"kv_cache_memory_bytes": 16 * 2**20}) as engine:
            return {number: await read(engine, number) for number in range(STREAMS)}

    return anyio.run(run)


async def crowd(fleet: Fleet, attack: Any) -> dict[int, Answer]:
    """All streams at once, with an attack once each of them has some tokens."""
    answers: dict[int, Answer] = {}
    seen: dict[int, int] = {}

    async def one(number: int) -> None:
        answers[number] = await read(fleet, number, seen)

    async with anyio.create_task_group() as group:
        for number in range(STREAMS):
            group.start_soon(one, number)
        await eventually(lambda: len(seen) == STREAMS and min(seen.values()) > 5, SPARE_SECONDS)
        await attack()
    return answers


def kill(fleet: Fleet, number: int) -> None:
    child = child_of(fleet.replicas[number])
    assert child is not None
    child.kill()


async def test_R1_streams_of_a_killed_replica_end_with_their_solo_tokens(checkpoint: Any, solo: Any) -> None:
    async with fleet_of(checkpoint) as fleet:
        moved: list[int] = []

        async def attack() -> None:
            moved.append(len(fleet.replicas[0].requests))
            kill(fleet, 0)

        answers = await crowd(fleet, attack)
        assert answers == solo
        assert moved[0] > 0
        text = (await fleet.metrics(compat=True)).decode()
        assert f'troupellm_failovers_total{{reason="died"}} {float(moved[0])}' in text


@pytest.mark.slow
async def test_R1_and_so_do_those_of_the_other_one_and_of_one_after_the_other(checkpoint: Any, solo: Any) -> None:
    async with fleet_of(checkpoint, failover_limit=5) as fleet:

        async def attack() -> None:
            kill(fleet, 1)
            await eventually(lambda: fleet.replicas[1].state == "ready", SPARE_SECONDS)
            kill(fleet, 0)

        assert await crowd(fleet, attack) == solo


@pytest.mark.slow
async def test_R2_both_replicas_die_and_streams_wait_for_one(checkpoint: Any, solo: Any) -> None:
    async with fleet_of(checkpoint) as fleet:

        async def attack() -> None:
            kill(fleet, 0)
            kill(fleet, 1)
            await eventually(lambda: not any(each.state == "ready" for each in fleet.replicas))
            assert fleet.state == "starting"
            await eventually(lambda: all("signal 9" in each.reason for each in fleet.replicas))
            assert len(fleet.missing()) == 2
            with pytest.raises(EngineStopped, match="no replica is ready: replica 0: its process ended by signal 9"):
                await fleet.generate([5], max_tokens=1)

        assert await crowd(fleet, attack) == solo


async def test_R3_replicas_restart_one_after_the_other_without_a_lost_stream(checkpoint: Any, solo: Any) -> None:
    async with fleet_of(checkpoint) as fleet:
        before = [each.pid for each in fleet.replicas]
        assert await crowd(fleet, fleet.restart) == solo
        assert all(pid not in before for pid in [each.pid for each in fleet.replicas])
        assert [each.restarts for each in fleet.replicas] == [1, 1]


async def test_R4_a_request_that_loses_too_many_replicas_fails_alone(checkpoint: Any) -> None:
    async with fleet_of(checkpoint, failover_limit=0) as fleet:
        seen: dict[int, int] = {}
        failed: list[TroupeError] = []

        async def one() -> None:
            try:
                await read(fleet, 0, seen, hints=KVHints(replica=0))
            except TroupeError as error:
                failed.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            await eventually(lambda: seen.get(0, 0) > 5, SPARE_SECONDS)
            kill(fleet, 0)
        assert failed[0].code == "engine_failed"
        assert "failover_limit" in failed[0].message
        assert (await fleet.generate([5, 6], max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3


@pytest.mark.slow
async def test_R5_a_reader_that_stands_still_pauses_its_request_over_a_failover(checkpoint: Any, solo: Any) -> None:
    async with fleet_of(checkpoint, stream_budget_tokens=64) as fleet:
        tokens: list[int] = []
        async with fleet.stream(prompt(1), **sampling(1), hints=KVHints(replica=0)) as stream:
            tokens += (await anext(stream)).token_ids
            await eventually(lambda: fleet.snapshot().scheduler.paused == 1)
            kill(fleet, 0)
            await eventually(lambda: len(fleet.replicas[1].requests) == 1)
            await eventually(lambda: fleet.snapshot().scheduler.paused == 1, SPARE_SECONDS)
            async for delta in stream:
                tokens += delta.token_ids
        assert tuple(tokens) == solo[1][0][0]


@pytest.mark.slow
async def test_R6_a_client_that_leaves_while_its_request_moves_leaves_nothing_behind(checkpoint: Any) -> None:
    async with fleet_of(checkpoint) as fleet:
        for attempt in range(3):
            await eventually(lambda: all(each.state == "ready" for each in fleet.replicas), SPARE_SECONDS)
            async with fleet.stream(prompt(1), **sampling(1), hints=KVHints(replica=attempt % 2)) as stream:
                await anext(stream)
                kill(fleet, attempt % 2)
            await eventually(lambda: fleet.snapshot().open_requests == 0)
        await eventually(lambda: all(each.state == "ready" for each in fleet.replicas), SPARE_SECONDS)
        await eventually(lambda: fleet.snapshot().scheduler.running == 0)
        assert all(each.place.work == each.place.rows == 0 for each in fleet.replicas if each.place is not None)


async def test_R7_a_model_that_cannot_be_loaded_fails_the_start_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises((ModelLoadError, ConfigError)):
        async with fleet_of(tmp_path):
            raise AssertionError("it must not open")


async def test_whole_answers_pooled_limits_and_commands_go_through_a_fleet(checkpoint: Any, solo: Any) -> None:
    async with fleet_of(checkpoint, max_num_seqs=2, max_num_queued_reqs=1, kv_events="keys") as fleet:
        assert (await fleet.generate(prompt(1), **sampling(1))).token_ids == solo[1][0][0]
        with pytest.raises(InvalidRequest, match=r"X-data-parallel-rank must be in 0\.\.1, got 99"):
            await fleet.generate([5], max_tokens=1, hints=KVHints(replica=99))
        with pytest.raises(TroupeError):
            await fleet.generate(prompt(1), max_tokens=-3)
        streams = [fleet.stream([5, 6], max_tokens=500, ignore_eos=True, wait=False) for _ in range(7)]
        opened = []
        for stream in streams:
            try:
                await stream.__aenter__()
                opened.append(stream)
            except TroupeError as error:
                assert error.code == "slow_down"  # noqa: PT017
        assert len(opened) == 6
        for stream in opened:
            await stream.cancel()
        answer = await fleet.administer("reset_prefix_cache", b"{}")
        assert msgspec.json.decode(answer)
        snapshot = msgspec.json.decode(await fleet.administer("snapshot", b"{}"))
        assert len(snapshot["replicas"]) == 2
        with pytest.raises(InvalidRequest, match=r"replica must be in 0\.\.1, got None"):
            await fleet.administer("kv_events", b"{}")
        await fleet.generate(prompt(1), max_tokens=40, ignore_eos=True, hints=KVHints(replica=1))
        answer = await fleet.administer("kv_events", b'{"replica": 1, "after": 0}')
        events = msgspec.json.decode(answer)["events"]
        assert events


async def test_an_engine_of_its_own_refuses_to_be_several(checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be 1 in an Engine, got 2"):
        Engine(checkpoint, data_parallel_size=2)
