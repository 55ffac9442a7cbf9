"""Tiers behind the device in a real engine: moving blocks out and back never changes the tokens."""

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.actors.engine.sleep import PauseAndSleep
from troupellm.actors.engine.system import WRITE_SECONDS
from troupellm.models.kv_offload.disk_store import DiskStore
from troupellm.protocol.errors import ConfigError
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio

MakeEngine = Callable[..., Engine]
ROOM = {"max_model_len": 128, "block_size": 16, "max_num_batched_tokens": 256, "max_num_seqs": 8}
LONG = [3 + number * 7 % 250 for number in range(100)]
SLOW = ROOM | {"kv_offloading_size": "8MiB", "kv_offload_timeout": 60.0}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompts(count: int) -> list[list[int]]:
    source = random.Random(3)
    prefixes = [[5] * 32, [7, 9] * 20, []]
    return [source.choice(prefixes) + [source.randrange(3, 250) for _ in range(20)] for _ in range(count)]


async def answers(engine: Engine, asked: list[list[int]], max_tokens: int) -> list[tuple[int, ...]]:
    """All at once."""
    found: list[tuple[int, ...]] = [()] * len(asked)

    async def ask(index: int) -> None:
        completion = await engine.generate(asked[index], max_tokens=max_tokens, **GREEDY)
        found[index] = tuple(completion.token_ids)

    async with anyio.create_task_group() as group:
        for index in range(len(asked)):
            group.start_soon(ask, index)
    return found


async def crowd(tiny_engine: MakeEngine, mode: str, count: int, **others: object) -> None:
    asked = prompts(count)
    async with tiny_engine(**ROOM) as engine:
        alone = [tuple((await engine.generate(prompt, max_tokens=24, **GREEDY)).token_ids) for prompt in asked]
        blocks = engine.snapshot().scheduler.blocks_total
    block_bytes = 4 * 2**20 // blocks
    small = ROOM | {"kv_cache_memory_bytes": 16 * block_bytes, "max_num_queued_reqs": 400}
    async with tiny_engine(**small, kv_offloading_size="8MiB", preemption_mode=mode, **others) as engine:
        assert engine.snapshot().scheduler.blocks_total == 16
        assert await answers(engine, asked, 24) == alone
        await eventually(lambda: not engine.snapshot().scheduler.offload.transfers)
        snapshot = engine.snapshot().scheduler
        assert snapshot.preemptions > 0
        assert snapshot.blocks_used == 0
        assert snapshot.offload.tiers[0].stores > 0
        if mode == "offload":  # whether a preempted one finds its blocks on the device or in host memory, time decides
            assert snapshot.offload.queried_tokens > 0


@pytest.mark.parametrize("mode", ["recompute", "offload"])
async def test_a_crowd_on_sixteen_blocks(tiny_engine: MakeEngine, mode: str) -> None:
    await crowd(tiny_engine, mode, 24)


async def test_a_crowd_with_drafts_on_sixteen_blocks(tiny_engine: MakeEngine) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    await crowd(tiny_engine, "offload", 16, speculative_config=drafts)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "offload", "auto"])
async def test_two_hundred_on_sixteen_blocks(tiny_engine: MakeEngine, mode: str) -> None:
    await crowd(tiny_engine, mode, 200)


async def test_a_conversation_outlives_its_engine_on_disk(tiny_engine: MakeEngine, tmp_path: Path) -> None:
    settings: dict[str, Any] = ROOM | {
        "kv_offloading_size": "8MiB",
        "kv_offload_disk_path": str(tmp_path / "blocks"),
        "preemption_mode": "offload",
    }
    async with tiny_engine(**settings) as engine:
        first = await engine.generate(LONG, max_tokens=8, **GREEDY)
        await eventually(lambda: engine.snapshot().scheduler.offload.tiers[1].stores >= len(LONG) // 16)
        again = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert again.usage.cached_sources.device > 0
    async with tiny_engine(**settings) as engine:
        later = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert later.usage.cached_sources.disk == 96
        assert later.usage.cached_tokens == 96
        await eventually(lambda: not engine.snapshot().scheduler.offload.transfers)
        assert await engine.reset_prefix_cache()
        computed = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert computed.usage.cached_tokens == 0
        await eventually(lambda: engine.snapshot().scheduler.offload.tiers[1].stores >= len(LONG) // 16)
    async with tiny_engine(**settings) as engine:  # what came after the reset is there, and nothing else
        again = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert again.usage.cached_sources.disk == 96
        assert await engine.reset_prefix_cache()
    assert not list((tmp_path / "blocks").glob("*.kv"))
    async with tiny_engine(**settings) as engine:
        again = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert again.usage.cached_tokens == 0
    assert first.token_ids == again.token_ids == later.token_ids == computed.token_ids


async def test_a_disk_that_was_sick_when_it_was_to_forget_has_forgotten_in_the_next_life(
    tiny_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = SLOW | {"kv_offload_disk_path": str(tmp_path)}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with tiny_engine(**settings) as engine:
        await engine.generate(LONG, max_tokens=8, **GREEDY)
        await eventually(lambda: engine.snapshot().scheduler.offload.tiers[1].stores >= len(LONG) // 16)
        with monkeypatch.context() as sick:
            for call in ("put", "probe"):
                sick.setattr(DiskStore, call, full)
            await engine.generate(LONG[::-1], max_tokens=8, **GREEDY)
            await eventually(lambda: engine.snapshot().scheduler.offload.tiers[1].disabled)
            assert not await engine.reset_prefix_cache()
            await engine.aclose()
    async with tiny_engine(**settings) as engine:
        later = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert later.usage.cached_tokens == 0


@pytest.mark.parametrize("stands", ["", "paused", "asleep"])
async def test_blocks_that_wait_for_a_slow_disk_are_written_before_the_engine_ends(
    tiny_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands: str
) -> None:
    settings: dict[str, Any] = SLOW | {"kv_offload_disk_path": str(tmp_path)}
    gate, put, write_out = threading.Event(), DiskStore.put, PauseAndSleep.write_out

    def slow(store: DiskStore, key: bytes, data: memoryview) -> None:
        gate.wait()
        put(store, key, data)

    async def begin(rest: PauseAndSleep, seconds: float) -> None:
        gate.set()
        await write_out(rest, seconds)

    monkeypatch.setattr(DiskStore, "put", slow)
    monkeypatch.setattr(PauseAndSleep, "write_out", begin)
    async with tiny_engine(**settings) as engine:
        await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert not list(tmp_path.glob("*.kv"))
        if stands == "paused":
            await engine.pause("keep", clear_cache=False)
        elif stands == "asleep":  # with all its memory
            await engine.sleep(0, "keep")
        await engine.drain(60.0)
    assert len(list(tmp_path.glob("*.kv"))) == len(LONG) // 16


async def test_no_longer_than_a_drain_may_take(
    tiny_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = SLOW | {"kv_offload_disk_path": str(tmp_path)}
    gate, write_out = threading.Event(), PauseAndSleep.write_out

    async def give_up(rest: PauseAndSleep, seconds: float) -> None:
        assert seconds == WRITE_SECONDS
        await write_out(rest, seconds)
        gate.set()

    monkeypatch.setattr(DiskStore, "put", lambda *put: gate.wait())
    monkeypatch.setattr(PauseAndSleep, "write_out", give_up)
    async with tiny_engine(**settings) as engine:
        await engine.generate(LONG, max_tokens=8, **GREEDY)
        await engine.drain(0.0)
    assert "KV blocks that waited to be written are lost" in caplog.text


async def test_host_memory_lasts_through_a_light_sleep_and_not_a_deep_one(tiny_engine: MakeEngine) -> None:
    async with tiny_engine(**ROOM, kv_offloading_size="8MiB", preemption_mode="offload") as engine:
        first = await engine.generate(LONG, max_tokens=8, **GREEDY)
        await eventually(lambda: not engine.snapshot().scheduler.offload.transfers)
        await engine.sleep(1)
        await engine.wake()
        light = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert light.usage.cached_sources.host == 96
        await eventually(lambda: not engine.snapshot().scheduler.offload.transfers)
        await engine.sleep(2)
        await engine.wake()
        deep = await engine.generate(LONG, max_tokens=8, **GREEDY)
        assert deep.usage.cached_tokens == 0
        assert engine.snapshot().scheduler.offload.tiers[0].corrupt == 0
        page = engine.metrics_text(compat=True).decode()
    assert first.token_ids == light.token_ids == deep.token_ids
    assert 'troupellm_kv_tier_loads_total{engine="0",' in page
    assert "vllm:external_prefix_cache_hits_total{" in page
    assert 'transfer_type="CPU_to_GPU"' in page


async def test_an_unknown_policy_is_refused_by_name(tiny_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="there is no fifo"):
        async with tiny_engine(**ROOM, kv_offloading_size="8MiB", kv_offload_policy="fifo"):
            pass
