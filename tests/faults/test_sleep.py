"""Engines with a real worker that sleep over their streams, in both seats."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from troupellm import Engine
from troupellm.protocol.errors import InvalidRequest, ModelLoadError
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS

pytestmark = pytest.mark.anyio

MIB = 2**20


@pytest.fixture(params=["thread", pytest.param("process", marks=pytest.mark.slow)])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SETTINGS | {"worker_process": request.param == "process", "spare_worker": False}


def asked(number: int) -> dict[str, Any]:
    return {"max_tokens": 150, "ignore_eos": True, "temperature": 1.0, "seed": number}


async def test_a_real_engine_sleeps_over_its_streams(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Drawn tokens, several streams, both levels; the same tokens as without the sleeps."""
    folder = write_tiny_model(tmp_path / "tiny")
    got: dict[int, tuple[int, ...]] = {}

    async with Engine(folder, **settings) as engine:

        async def ask(number: int) -> None:
            got[number] = (await engine.generate([40 + number, 41], **asked(number))).token_ids

        solo = {number: (await engine.generate([40 + number, 41], **asked(number))).token_ids for number in range(4)}
        async with anyio.create_task_group() as group:
            for number in solo:
                group.start_soon(ask, number)
            for level in (1, 2, 0):
                steps = engine.snapshot().scheduler.steps
                with anyio.fail_after(20):
                    while engine.snapshot().scheduler.steps < steps + 10:  # noqa: ASYNC110 - state of another task
                        await anyio.sleep(0.001)
                report = await engine.sleep(level, "keep")
                assert engine.snapshot().scheduler.plans_in_flight == 0
                assert report.rss_after > 0 or not level
                await engine.wake()
        assert got == solo
        assert engine.snapshot().scheduler.worker_losses == 0


@pytest.mark.slow
async def test_a_worker_process_that_dies_in_its_sleep_is_replaced_at_the_waking(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    async with Engine(folder, **SETTINGS, worker_process=True, spare_worker=False) as engine:
        before = await engine.generate([40, 41], **asked(1))
        await engine.sleep(1)
        pid = engine.snapshot().worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert engine.state == "ready"
        await engine.wake()
        assert engine.snapshot().worker_pid != pid
        assert (await engine.generate([40, 41], **asked(1))).token_ids == before.token_ids


async def test_weights_that_cannot_be_read_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    async with Engine(folder, **settings) as engine:
        await engine.sleep(2)
        (folder / "model.safetensors").rename(folder / "elsewhere")
        with pytest.raises(ModelLoadError, match=r"model\.safetensors is missing"):
            await engine.wake()
        assert engine.is_sleeping
        (folder / "elsewhere").rename(folder / "model.safetensors")
        await engine.wake()
        assert (await engine.generate([40, 41], max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3


@pytest.mark.slow
async def test_a_profile_of_a_real_engine(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    async with Engine(folder, **settings) as engine, anyio.create_task_group() as group:
        group.start_soon(lambda: engine.generate([40, 41], **asked(1)))
        await engine.start_profile(str(tmp_path / "traces"), max_steps=5)
        with pytest.raises(InvalidRequest) as refused:
            await engine.start_profile(str(tmp_path / "traces"))
        assert refused.value.code == "profile_running"
        await engine.generate([40, 42], max_tokens=8, ignore_eos=True)
        report = await engine.stop_profile()
        assert report.steps == 5
        assert Path(report.file).stat().st_size > 1000
        with pytest.raises(InvalidRequest):
            await engine.stop_profile()
        with pytest.raises(InvalidRequest):
            await engine.start_profile(str(tmp_path), max_steps=0)


@pytest.mark.slow
async def test_a_worker_process_gives_its_memory_back(tmp_path: Path) -> None:
    """As the system counts it: weights of 96 MiB, and a cache of 64 MiB that was written to."""
    folder = write_tiny_model(tmp_path / "large")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 512, "vocab_size": 24_576, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    large = {"load_format": "dummy", "kv_cache_memory_bytes": 64 * MIB, "poison_memory": "0x7f"}
    async with Engine(folder, **(SETTINGS | large), worker_process=True, spare_worker=False) as engine:
        before = await engine.generate([40, 41], max_tokens=5, ignore_eos=True, temperature=0.0)
        process = psutil.Process(engine.snapshot().worker_pid)
        awake = process.memory_info().rss
        report = await engine.sleep(2)
        asleep = process.memory_info().rss
        assert awake - asleep > 0.9 * 160 * MIB
        assert abs(report.freed - (awake - asleep)) < 8 * MIB
        await engine.wake()
        assert process.memory_info().rss > 0.9 * awake
        after = await engine.generate([40, 41], max_tokens=5, ignore_eos=True, temperature=0.0)
        assert after.token_ids == before.token_ids


@pytest.mark.slow
async def test_an_encoder_sleeps_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    """It has no KV cache to give back, and makes the same vectors afterwards."""
    folder = tmp_path / "encoder"
    tiny_encoder.write_encoder(folder, tiny_encoder.bert, pooling="mean_tokens")
    async with Engine(folder, **settings) as engine:
        before = await engine.embed("one two three")
        for level in (1, 2):
            await engine.sleep(level)
            assert engine.is_sleeping
            await engine.wake()
            assert await engine.embed("one two three") == before
