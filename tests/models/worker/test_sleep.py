"""A worker that sleeps really gives memory back, takes it again, and computes the same as before."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from troupellm.models.worker.memory_use import give_back, resident_bytes
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import InvalidRequest, ModelLoadError
from troupellm.protocol.messages.sleep import SleepWorker, StartProfile, StopProfile, WakeWorker
from troupellm.protocol.messages.worker import LoadProgress, NewRow, SamplingState, StepPlan, WorkerReady
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

MIB = 2**20
CACHE = 96 * MIB
WIDTH = 24_576
"""Of the logits: 2 x 48 MiB of weights at 512 wide."""
WEIGHTS = 2 * WIDTH * 512 * 4


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model whose weights are drawn, so large that the machine notices."""
    folder = write_tiny_model(tmp_path / "large")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 512, "vocab_size": WIDTH, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def silent(progress: LoadProgress) -> None:
    """Ignores the progress."""


def loaded(folder: Path, **settings: Any) -> tuple[ModelWorker, WorkerReady]:
    worker = ModelWorker(folder)
    return worker, worker.load(EngineConfig.from_flat({"device": "cpu", **settings}), silent)


def first_token(worker: ModelWorker, step: int) -> int:
    prompt = array("i", range(40, 60))
    row = NewRow(
        row=step,
        epoch=0,
        request_id="",
        token_ids=prompt.tobytes(),
        num_prompt_tokens=len(prompt),
        sampling=SamplingState(temperature=0.0),
        blocks=((0, 1),),
    )
    plan = StepPlan(step=step, engine_epoch=0, rows=(step,), epochs=(0,), starts=(0,), counts=(20,), new_rows=(row,))
    return worker.collect(worker.launch(plan)).tokens[0]


def test_memory_goes_back_to_the_machine_and_comes_again(large: Path) -> None:
    """The poison writes all of the cache, so that the machine has really given it."""
    give_back()
    settings = {"load_format": "dummy", "kv_cache_memory_bytes": CACHE, "poison_memory": "0x7f"}
    worker, ready = loaded(large, **settings)
    before = first_token(worker, 1)
    awake = resident_bytes()
    shallow = worker.command(SleepWorker(1), silent)
    assert shallow.rss_before - shallow.rss_after > 0.9 * CACHE
    deep = worker.command(SleepWorker(2), silent)
    assert deep.rss_before - deep.rss_after > 0.9 * WEIGHTS
    assert awake - resident_bytes() > 0.9 * (CACHE + WEIGHTS)
    with pytest.raises(RuntimeError):
        first_token(worker, 2)
    with pytest.raises(RuntimeError):
        worker.reset()
    weights = worker.command(WakeWorker(kv_cache=False), silent)
    assert weights.ready is None
    assert weights.rss_after - weights.rss_before > 0.9 * WEIGHTS
    cache = worker.command(WakeWorker(), silent)
    assert cache.ready == ready
    assert cache.rss_after - cache.rss_before > 0.9 * CACHE
    assert first_token(worker, 3) == before
    worker.close()


def test_weights_that_have_gone_meanwhile(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    worker, ready = loaded(folder, kv_cache_memory_bytes=MIB)
    before = first_token(worker, 1)
    worker.command(SleepWorker(2), silent)
    (folder / "model.safetensors").rename(folder / "elsewhere")
    with pytest.raises(ModelLoadError, match="missing"):
        worker.command(WakeWorker(), silent)
    (folder / "elsewhere").rename(folder / "model.safetensors")
    told: list[LoadProgress] = []
    assert worker.command(WakeWorker(), told.append).ready == ready
    assert {progress.phase for progress in told} == {"weights"}
    assert first_token(worker, 2) == before
    worker.close()


def test_a_profile_holds_the_steps_that_it_may(tmp_path: Path) -> None:
    worker, _ = loaded(write_tiny_model(tmp_path / "tiny"), kv_cache_memory_bytes=MIB)
    with pytest.raises(InvalidRequest, match="no profile"):
        worker.command(StopProfile(), silent)
    for wanted, steps in ((1, 1), (10, 3)):
        start = StartProfile(folder=str(tmp_path / "traces"), name=f"of-{wanted}", max_steps=wanted)
        worker.command(start, silent)
        with pytest.raises(InvalidRequest, match="already"):
            worker.command(start, silent)
        for step in range(3):
            first_token(worker, 10 * wanted + step)
        report = worker.command(StopProfile(), silent)
        assert report.steps == steps
        assert Path(report.file).parent == tmp_path / "traces"
        events = json.loads(Path(report.file).read_text())["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot be made"):
        worker.command(StartProfile(folder=str(tmp_path / "file"), name="x", max_steps=1), silent)
    worker.close()
