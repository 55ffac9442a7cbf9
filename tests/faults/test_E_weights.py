"""A worker that restarts or wakes serves the weights that were served before, or none at all."""

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm import Engine
from troupellm.protocol.errors import TroupeError, WeightsChanged
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # each starts two worker processes

ALONE: dict[str, Any] = SETTINGS | {"worker_process": True, "spare_worker": False}
ASK: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
NAMED = "model.safetensors has changed since the weights that are served were read"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder of this test's own."""
    return write_tiny_model(tmp_path / "tiny")


async def test_E1_a_killed_worker_is_not_replaced_by_one_with_other_weights(folder: Path) -> None:
    """Once the stream went on with the tokens of the new file."""
    got: list[int] = []
    async with Engine(folder, **ALONE) as engine:

        async def overwrite_and_kill() -> None:
            await eventually(lambda: len(got) > 2, SPARE_SECONDS)
            write_tiny_model(folder, seed=1)
            os.kill(engine.snapshot().worker_pid, signal.SIGKILL)

        async def read() -> None:
            async with engine.stream([40, 41, 42], **ASK) as stream:
                async for delta in stream:
                    got.extend(delta.token_ids)

        async with anyio.create_task_group() as group:
            group.start_soon(overwrite_and_kill)
            with pytest.raises(TroupeError) as caught:
                await read()
        assert caught.value.code == "engine_failed"
        assert 2 < len(got) < ASK["max_tokens"]
        assert isinstance(engine.failure, WeightsChanged)
        assert engine.failure.code == "weights_changed"
        assert str(engine.failure).startswith(NAMED)
        assert engine.failure.hint is not None
        assert "restart the engine" in engine.failure.hint
        with pytest.raises(TroupeError):
            await engine.generate([40, 41, 42], **ASK)


async def test_E1_a_killed_worker_is_replaced_where_the_files_are_untouched(folder: Path) -> None:
    async with Engine(folder, **ALONE) as engine:
        before = await engine.generate([40, 41, 42], **ASK)
        os.kill(engine.snapshot().worker_pid, signal.SIGKILL)
        await eventually(lambda: engine.snapshot().scheduler.worker_losses == 1, SPARE_SECONDS)
        assert (await engine.generate([40, 41, 42], **ASK)).token_ids == before.token_ids


@pytest.mark.parametrize("dies", [False, True])
async def test_E1_a_sleeping_worker_does_not_wake_with_other_weights(folder: Path, dies: bool) -> None:
    """Neither by itself, nor as the successor of one that died in its sleep; with the files put back it wakes."""
    times = {path.name: path.stat() for path in folder.iterdir()}
    async with Engine(folder, **ALONE) as engine:
        before = await engine.generate([40, 41, 42], **ASK)
        await engine.sleep(level=2)
        write_tiny_model(folder, seed=1)
        if dies:
            os.kill(engine.snapshot().worker_pid, signal.SIGKILL)
        with pytest.raises(WeightsChanged, match="has changed since"):
            await engine.wake()
        write_tiny_model(folder)
        for path in folder.iterdir():
            found = times[path.name]
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        await engine.wake()
        assert (await engine.generate([40, 41, 42], **ASK)).token_ids == before.token_ids
