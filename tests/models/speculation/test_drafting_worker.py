"""A worker that drafts: what it says at load, what it gives back in its sleep, what it refuses."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from troupellm.models.cuda.device import CpuDevice
from troupellm.models.runner import ModelRunner
from troupellm.models.speculation.ngram import NgramProposer
from troupellm.models.worker import ModelWorker
from troupellm.protocol.config import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.rest import SleepWorker, WakeWorker
from troupellm.protocol.worker import LoadProgress, WorkerReady

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def silent(progress: LoadProgress) -> None:
    """Nobody watches."""


def loaded(folder: Path, **settings: Any) -> tuple[ModelWorker, WorkerReady]:
    worker = ModelWorker(folder)
    return worker, worker.load(EngineConfig.from_flat({"device": "cpu", **settings}), silent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def test_a_worker_says_how_many_drafts_it_takes_and_sleeps_without_its_proposer(folder: Path) -> None:
    worker, ready = loaded(folder, speculative_config=NGRAM)
    assert ready.most_drafts == 3
    runner = worker.runner
    assert isinstance(runner, ModelRunner)
    assert runner.speculator is not None
    proposer = weakref.ref(runner.speculator.proposer)
    worker.reset()
    again = worker.runner
    assert isinstance(again, ModelRunner)
    assert again.speculator is not None
    assert again.speculator.proposer is proposer()
    del runner, again
    worker.command(SleepWorker(level=2), silent)
    gc.collect()
    assert proposer() is None
    worker.command(WakeWorker(), silent)
    awake = worker.runner
    assert isinstance(awake, ModelRunner)
    assert awake.speculator is not None
    assert isinstance(awake.speculator.proposer, NgramProposer)
    worker.close()


def test_none_without_a_speculative_config(folder: Path) -> None:
    worker, ready = loaded(folder)
    assert ready.most_drafts == 0
    assert isinstance(worker.runner, ModelRunner)
    assert worker.runner.speculator is None
    worker.close()


def test_drafters_that_are_models_are_for_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu(CpuDevice):
        torch_device = torch.device("cuda")

        def memory(self) -> tuple[int, int]:
            return 2**30, 2**31

    monkeypatch.setattr("troupellm.models.worker.find_device", lambda wanted: Gpu())
    with pytest.raises(ConfigError, match="method mtp is for the device cpu as yet"):
        loaded(folder, speculative_config={"method": "mtp"})
