"""The whole engine over the device's runner answers as it does over the CPU's."""

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from troupellm import Engine
from troupellm.actors.runtime import thread_pool
from troupellm.models.gpu.cuda_graphs import DecodeGraphs
from troupellm.models.gpu.runner import CudaRunner
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.gpu.pretended_gpu import pretend_gpu
from troupellm.tests.support.speculation.scripted_drafts import MODULE as DRAFTS

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[pytest.param(True, id="uvloop"), pytest.param(False, id="asyncio", marks=pytest.mark.slow)])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


LONG = {"max_tokens": 24, "ignore_eos": True}
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, **LONG},
    {"temperature": 0.9, "seed": 1, "n": 3, **LONG},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.8, **LONG},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "logprobs": 2, **LONG},
    {"temperature": 1.0, "seed": 4, "guide": StructuredOutputsParams(regex="[a-z]{5,9}[0-9]{3}").spec(), **LONG},
    {"temperature": 0.0, "guide": StructuredOutputsParams(choice=["a very long choice", "a short one"]).spec(), **LONG},
    {"temperature": 0.0, "min_tokens": 6, "stop": ["e"], "max_tokens": 24},
)


async def answers(folder: Path, **settings: Any) -> tuple[list[Any], list[list[float]]]:
    found: list[Any] = [None] * len(REQUESTS)
    async with Engine(str(folder), **(SETTINGS | settings)) as engine:

        async def one(number: int) -> None:
            answer = await engine.generate([40 + number, 41, 42] * (1 + 3 * number), **REQUESTS[number])
            found[number] = [(choice.text, choice.finish_reason) for choice in answer.choices]

        async with anyio.create_task_group() as group:
            for number in range(len(REQUESTS)):
                group.start_soon(one, number)
        vectors = await engine.embed(["a fox", "x y z", "0123456789 " * 6])
    return found, vectors


DRAFTS = {
    "method": "custom", "custom_class": f"{DRAFTS}:Guessing", "num_speculative_tokens": 4, "adaptive": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "pool",
    [{}, {"num_gpu_blocks_override": 20, "kv_cache_memory_bytes": None}, {"speculative_config": DRAFTS}],
    ids=["", "small", "drafts"],
)
async def test_every_kind_of_request(
    tmp_path: Path, gpu: None, monkeypatch: pytest.MonkeyPatch, pool: dict[str, Any]
) -> None:
    write_tiny_model(tmp_path)
    common = {"max_model_len": 160, "block_size": 8, "max_num_batched_tokens": 32, **pool}
    made = []
    launch = CudaRunner.launch
    monkeypatch.setattr(CudaRunner, "launch", lambda self, plan: made.append(plan.step) or launch(self, plan))
    got, vectors = await answers(tmp_path, **common)
    assert len(made) > (12 if "speculative_config" in pool else 24)
    monkeypatch.undo()
    common.pop("speculative_config", None)
    expected, others = await answers(tmp_path, **common)
    assert got == expected
    for mine, theirs in zip(vectors, others, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


async def test_graphs_are_there_before_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path)
    pretend_gpu(monkeypatch, (1, 2, 4))
    monkeypatch.setattr(thread_pool, "_IDLE_CHECK_SECONDS", 0.01)
    done, idle = threading.Event(), DecodeGraphs.idle

    def watched(self: DecodeGraphs) -> bool:
        found = idle(self)
        if not found:
            done.set()
        return found

    monkeypatch.setattr(DecodeGraphs, "idle", watched)
    small = {"max_model_len": 160, "block_size": 8, "max_num_batched_tokens": 32}
    async with Engine(str(tmp_path), **(SETTINGS | small)) as engine:
        await anyio.to_thread.run_sync(done.wait, 30.0)
        assert engine.snapshot().scheduler.graphs is None  # not reported yet
        await engine.generate([40, 41], max_tokens=3, temperature=0.0, ignore_eos=True)
        graphs = engine.snapshot().scheduler.graphs
    assert graphs is not None
    assert (graphs.captured, graphs.missing) == (3, 0)
