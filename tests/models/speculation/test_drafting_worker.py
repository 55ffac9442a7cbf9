"""A worker that drafts: what it says at load, what it gives back in its sleep, what it refuses."""

import gc
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from troupellm.models.config.decoder_config import MlaConfig
from troupellm.models.load.architecture import describe_model
from troupellm.models.proposers.ngram import NgramProposer
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.speculation.plan import plan_drafting
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.sleep import SleepWorker, WakeWorker
from troupellm.protocol.messages.worker import LoadProgress, StepPlan, WorkerReady
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def silent(progress: LoadProgress) -> None:
    """Ignores the progress."""


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


def test_how_the_proposer_stands_is_told_once_and_again_after_a_reset(folder: Path) -> None:
    def step(number: int) -> ProposerReport | None:
        plan = StepPlan(step=number, engine_epoch=0, rows=(), epochs=(), starts=(), counts=())
        return worker.collect(worker.launch(plan)).proposer

    worker, _ = loaded(folder, speculative_config={"method": "suffix"})
    first, silent_now = step(0), step(1)
    worker.reset()
    again = step(2)
    worker.command(SleepWorker(level=1), silent)
    worker.command(WakeWorker(), silent)
    other = step(3)
    worker.close()
    assert first is not None
    assert other is not None
    assert silent_now is None
    assert again == first
    assert other.life != first.life, "its counts begin anew"
    worker, _ = loaded(folder, speculative_config=NGRAM)
    assert step(0) is None
    worker.close()


def test_none_without_a_speculative_config(folder: Path) -> None:
    worker, ready = loaded(folder)
    assert ready.most_drafts == 0
    assert isinstance(worker.runner, ModelRunner)
    assert worker.runner.speculator is None
    worker.close()


def test_trees_over_latent_attention_are_for_a_cpu(folder: Path) -> None:
    wanted = {"method": "eagle", "model": str(folder), "tree_widths": [2, 2]}
    config = EngineConfig.from_flat({"model": str(folder), "speculative_config": wanted})
    latent = MlaConfig(latent=16, plain=8, rotated=8, value=8, query_latent=None)
    model = msgspec.structs.replace(describe_model(folder), mla=latent)
    with pytest.raises(ConfigError, match="latent attention are for the device cpu; on cuda leave them out"):
        plan_drafting(config, folder, model, 64, torch.float32, torch.device("cuda"), silent)
