"""The debug allocator: what it poisons, and that reading it shows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from troupellm.models.runner.poison import Poison
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import BlockCopy, NewRow, RowChange, SamplingState, StepPlan, StepResult
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.inside import runner_of

PROMPT = (5, 17, 120, 3, 44, 9, 201, 8, 77, 30)
SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def load(folder: Path, poison: str = "nan", **settings: object) -> ModelWorker:
    worker = ModelWorker(folder)
    given = {"num_gpu_blocks_override": 12, "block_size": SIZE, "max_model_len": 40, "poison_memory": poison}
    worker.load(EngineConfig.from_flat({**given, **settings}), lambda progress: None)
    return worker


def new_row(row: int, blocks: tuple[int, ...], *, tokens: tuple[int, ...] = PROMPT, epoch: int = 0) -> NewRow:
    return NewRow(
        row=row,
        epoch=epoch,
        request_id="",
        token_ids=np.array(tokens, "<i4").tobytes(),
        blocks=(blocks,),
        num_prompt_tokens=len(tokens),
        sampling=SamplingState(temperature=0.0),
    )


def step(worker: ModelWorker, spans: dict[int, tuple[int, int]], **parts: object) -> StepResult:
    plan = StepPlan(
        step=0,
        engine_epoch=0,
        rows=tuple(spans),
        epochs=(0,) * len(spans),
        starts=tuple(start for start, _ in spans.values()),
        counts=tuple(count for _, count in spans.values()),
        **parts,
    )
    return worker.collect(worker.launch(plan))


def poisoned(worker: ModelWorker) -> set[tuple[int, int]]:
    """(block, place) of the positions that are NaN in every layer."""
    storage = runner_of(worker).cache.storage
    where = storage.isnan().all(dim=-1).all(dim=3).all(dim=0).all(dim=0)
    return {(block, place) for block, place in where.nonzero().tolist()}


def positions(*blocks: int) -> set[tuple[int, int]]:
    return {(block, place) for block in blocks for place in range(SIZE)}


def test_all_memory_is_poisoned_at_start(folder: Path) -> None:
    assert poisoned(load(folder)) == positions(*range(12))
    bytes_of_it = runner_of(load(folder, "0x7f")).cache.storage.view(torch.uint8)
    assert bytes_of_it.unique().tolist() == [0x7F]


def test_what_was_written_is_no_poison_any_more(folder: Path) -> None:
    worker = load(folder)
    step(worker, {0: (0, 10)}, new_rows=(new_row(0, (1, 2, 3)),))
    assert poisoned(worker) == positions(*range(12)) - positions(1, 2) - {(3, 0), (3, 1)}


def test_a_block_that_is_given_again_is_poisoned_behind_what_was_found_or_copied(folder: Path) -> None:
    worker = load(folder)
    clean = step(worker, {0: (0, 10)}, new_rows=(new_row(0, (1, 2, 3)),))
    step(worker, {1: (0, 10)}, new_rows=(new_row(1, (4, 5, 6)),))
    again = step(
        worker,
        {2: (9, 1)},
        new_rows=(new_row(2, (1, 2, 6)),),
        freed_rows=(1,),
        copies=(BlockCopy(0, 3, 6),),
    )
    assert again.tokens == clean.tokens
    assert {place for block, place in poisoned(worker) if block == 6} == {2, 3}
    step(worker, {2: (10, 1)}, changes=(RowChange(row=2, appended_blocks=((4,),)),))
    assert positions(4) <= poisoned(worker)
    assert not positions(5) & poisoned(worker)


def test_without_a_prefix_cache_a_freed_block_is_poisoned_at_once(folder: Path) -> None:
    worker = load(folder, enable_prefix_caching=False)
    step(worker, {0: (0, 10)}, new_rows=(new_row(0, (1, 2, 3)),))
    step(worker, {1: (0, 10)}, new_rows=(new_row(1, (4, 5, 6)),))
    assert not positions(1, 2) & poisoned(worker)
    step(worker, {1: (10, 1)}, freed_rows=(0,))
    assert positions(1, 2, 3) <= poisoned(worker)
    assert not positions(4, 5) & poisoned(worker)


@pytest.mark.parametrize("poison", ["nan", "0x7f"])
def test_a_read_of_what_was_not_written_shows(folder: Path, poison: str) -> None:
    right = step(load(folder, "off"), {0: (0, 10)}, new_rows=(new_row(0, (1, 2, 3)),))
    worker = load(folder, poison)
    assert step(worker, {0: (0, 10)}, new_rows=(new_row(0, (1, 2, 3)),)).tokens == right.tokens
    wrong = step(worker, {1: (8, 2)}, new_rows=(new_row(1, (4, 5, 6)),))  # as if two blocks had been found
    assert [error.row for error in wrong.errors] == [1]


def test_tokens_of_forgotten_rows_are_poisoned(folder: Path) -> None:
    worker = load(folder)
    step(worker, {0: (0, 10)}, new_rows=(new_row(0, (1, 2, 3)),))
    slot = runner_of(worker).rows.slot(0)
    step(worker, {}, freed_rows=(0,))
    assert runner_of(worker).rows.tokens[slot].unique().tolist() == [0x7F7F7F7F]


class OnGpu(torch.Tensor):
    """On the CPU, and says it is not."""

    is_cuda = True


def test_a_gpu_has_poisoned_a_block_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are copied on another stream."""
    storage = torch.zeros(1, 1, 3, 1, SIZE).as_subclass(OnGpu)
    cache: Any = SimpleNamespace(storage=storage, model_storages=(storage,), block_size=SIZE, states=None)
    cache.layout, cache.of_group = SimpleNamespace(windows=(None,)), lambda group: [(storage[0, 0], 1)]
    poison = Poison(cache, "nan", when_freed=False)
    storage.zero_()
    waits = list[list[bool]]()
    stream = SimpleNamespace(synchronize=lambda: waits.append(storage[0, 0, :, 0].isnan().all(dim=1).tolist()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    poison.before_loads({0, 2})
    assert waits == [[True, False, True]]
