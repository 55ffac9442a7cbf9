"""A worker on a GPU that gives its memory back."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.models.gpu import device
from troupellm.models.gpu.device import CpuDevice, Graph
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import GraphCaptureError
from troupellm.protocol.messages.sleep import SleepWorker
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.gpu.device_runner import device_runner
from troupellm.tests.support.gpu.pretended_gpu import pretend_gpu


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelWorker]:
    pretend_gpu(monkeypatch, (1, 2))
    write_tiny_model(tmp_path)
    settings = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    worker = ModelWorker(tmp_path)
    worker.load(EngineConfig.from_flat({"model": str(tmp_path), **settings}), lambda progress: None)
    monkeypatch.setattr(CpuDevice, "capture", lambda self, body: Forgetful())
    yield worker
    worker.close()


class Forgetful(Graph):
    """Keeps nothing of what was captured, as a graph on a device does."""

    def replay(self) -> None:
        raise AssertionError


@pytest.fixture
def frozen() -> Iterator[None]:
    """As a worker process is behind its load: cycles that there were are never found."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("parts", range(4))
def test_all_goes_at_once_between_any_parts_of_captures(worker: ModelWorker, frozen: None, parts: int) -> None:
    for _ in range(parts):
        assert worker.idle()
    gone = kept(worker.runner)
    gc.freeze()
    worker.command(SleepWorker(level=2), lambda progress: None)
    assert [name for name, there in gone.items() if there() is not None] == []


def test_memory_is_given_back_in_nobodys_capture(worker: ModelWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = list[bool]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: locked.append(device._CAPTURING.locked()))
    worker.command(SleepWorker(level=1), lambda progress: None)
    assert locked == [True]


def test_a_classifier_goes_with_its_runner(llama: Pair, frozen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama.decoder, "score", object(), raising=False)
    runner = device_runner(llama, ())
    gone = weakref.ref(runner)
    del runner
    assert gone() is None


def kept(runner: object) -> dict[str, Callable[[], Any]]:
    """The parts that hold memory of a device."""
    assert isinstance(runner, CudaRunner)
    parts = {"graphs": runner.graphs, "rows": runner.rows, "cache": runner.cache, "decoder": runner.decoder}
    return {"runner": weakref.ref(runner), **{name: weakref.ref(part) for name, part in parts.items()}}


def test_a_device_that_is_broken_is_said_to_be(worker: ModelWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory could not be freed, and waking would forget that it is broken."""
    runner = worker.runner
    assert isinstance(runner, CudaRunner)
    refused = RuntimeError("not permitted")

    def capture(_: object) -> None:
        raise refused

    monkeypatch.setattr(runner.device, "capture", capture)
    while worker.idle():
        pass
    with pytest.raises(GraphCaptureError):
        worker.command(SleepWorker(level=1), lambda progress: None)
