"""A worker that serves adapters: what it says of itself, and what a reset and a sleep leave of them."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from troupellm.models.adapters.files import adapter_digest
from troupellm.models.batch.row_table import PlanError
from troupellm.models.load.architecture import describe_model
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.sleep import SleepWorker, WakeWorker
from troupellm.protocol.messages.worker import AdapterSlot, LoadProgress, NewRow, SamplingState, StepPlan, WorkerReady
from troupellm.tests.support.adapters.peft_folders import write_adapter
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def silent(progress: LoadProgress) -> None:
    """Ignores the progress."""


def loaded(folder: Path, **settings: Any) -> tuple[ModelWorker, WorkerReady]:
    worker = ModelWorker(folder)
    return worker, worker.load(
        EngineConfig.from_flat({"device": "cpu", "num_gpu_blocks_override": 16, **settings}), silent
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    found = tmp_path_factory.mktemp("adapter")
    write_adapter(found, describe_model(folder), rank=8, lora_alpha=64)
    return found


def token(worker: ModelWorker, slot: int, digest: str = "") -> int:
    """The first token of a fixed prompt with the adapter in a slot, which gets that content first if one is given."""
    prompt = array("i", range(40, 60))
    row = NewRow(
        row=0,
        epoch=0,
        request_id="",
        token_ids=prompt.tobytes(),
        num_prompt_tokens=len(prompt),
        sampling=SamplingState(temperature=0.0),
        blocks=((0, 1),),
        adapter=slot,
    )
    changes = (AdapterSlot(slot, digest),) if digest else ()
    plan = StepPlan(
        step=0,
        engine_epoch=0,
        rows=(0,),
        epochs=(0,),
        starts=(0,),
        counts=(20,),
        new_rows=(row,),
        freed_rows=(0,),
        adapters=changes,
    )
    return worker.collect(worker.launch(plan)).tokens[0]


def test_a_worker_says_how_many_slots_it_has(folder: Path) -> None:
    assert loaded(folder)[1].max_loras == 0
    assert loaded(folder, **LORA)[1].max_loras == 2


def test_a_prepared_adapter_changes_the_rows_that_name_it(folder: Path, adapter: Path) -> None:
    worker, _ = loaded(folder, **LORA)
    digest = adapter_digest(adapter)
    assert worker.prepare_adapter(digest, str(adapter)).outcome == "prepared"
    base = token(worker, 0)
    changed = token(worker, 1, digest)
    assert changed != base
    worker.release_adapter(digest)
    assert token(worker, 1) == changed  # the slot keeps its content
    assert token(worker, 0) == base
    with pytest.raises(PlanError, match="is not prepared"):
        token(worker, 2, digest)


def test_after_a_reset_slots_are_empty_and_adapters_are_prepared_again(folder: Path, adapter: Path) -> None:
    worker, _ = loaded(folder, **LORA)
    digest = adapter_digest(adapter)
    worker.prepare_adapter(digest, str(adapter))
    changed = token(worker, 1, digest)
    worker.reset()
    with pytest.raises(PlanError, match="slot 1 holds none"):
        token(worker, 1)
    with pytest.raises(PlanError, match="is not prepared"):
        token(worker, 2, digest)
    worker.prepare_adapter(digest, str(adapter))
    assert token(worker, 2, digest) == changed


@pytest.mark.parametrize("level", [1, 2])
def test_after_a_sleep_adapters_are_prepared_again(folder: Path, adapter: Path, level: int) -> None:
    worker, _ = loaded(folder, **LORA)
    digest = adapter_digest(adapter)
    worker.prepare_adapter(digest, str(adapter))
    changed = token(worker, 1, digest)
    worker.command(SleepWorker(level=level), silent)
    worker.command(WakeWorker(), silent)
    with pytest.raises(PlanError, match="is not prepared"):
        token(worker, 1, digest)
    worker.prepare_adapter(digest, str(adapter))
    assert token(worker, 1, digest) == changed


def test_an_adapter_that_does_not_fit_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    worker, _ = loaded(folder, **LORA)
    write_adapter(tmp_path, describe_model(folder), rank=9)
    answer = worker.prepare_adapter(adapter_digest(tmp_path), str(tmp_path))
    assert answer.outcome == "refused"
    assert "--max-lora-rank 9" in answer.error


def test_a_worker_without_adapters_refuses_all_of_them(folder: Path, adapter: Path) -> None:
    worker, _ = loaded(folder)
    assert worker.prepare_adapter(adapter_digest(adapter), str(adapter)).outcome == "refused"
    worker.release_adapter(adapter_digest(adapter))
    with pytest.raises(PlanError, match="slot 1 holds none"):
        token(worker, 1)


def test_another_dtype_than_that_of_activations_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="lora_dtype must be auto or float32"):
        loaded(folder, **LORA, lora_dtype="bfloat16")
