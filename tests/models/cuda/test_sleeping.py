"""A worker on a GPU that gives its memory back."""

from pathlib import Path

import pytest

from tests.support.pretended_gpu import pretend_gpu
from tests.support.tiny_model import write_tiny_model
from troupellm.models.cuda.runner import CudaRunner
from troupellm.models.worker import ModelWorker
from troupellm.protocol.config import EngineConfig
from troupellm.protocol.errors import GraphCaptureError
from troupellm.protocol.rest import SleepWorker


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelWorker:
    pretend_gpu(monkeypatch, (1, 2))
    write_tiny_model(tmp_path)
    settings = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    worker = ModelWorker(tmp_path)
    worker.load(EngineConfig.from_flat({"model": str(tmp_path), **settings}), lambda progress: None)
    return worker


def test_a_device_that_is_broken_is_said_to_be(worker: ModelWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has would not go, and a waking would forget that it is broken."""
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
    worker.close()
