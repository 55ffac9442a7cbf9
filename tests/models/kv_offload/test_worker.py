"""Blocks leave the device and come back to other blocks with their whole contents, for every kind of cache."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from troupellm.models.batch.row_table import PlanError
from troupellm.models.kv_offload.block_copy import bytes_of_block
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.sleep import EMPTY, WITHOUT_CACHE, SleepWorker, WakeWorker
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan, StepResult, WorkerReady
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.inside import arena_of, transfers_of
from troupellm.tests.support.kv.transfers import Driver, move

PROMPT = tuple(range(40, 56))
SIZE = 4
FULL = len(PROMPT) // SIZE
SETTINGS = {"num_gpu_blocks_override": 24, "block_size": SIZE, "max_model_len": 64, "kv_offloading_size": "1MiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def load(folder: Path, **settings: object) -> tuple[ModelWorker, WorkerReady]:
    worker = ModelWorker(folder)
    return worker, worker.load(EngineConfig.from_flat({**SETTINGS, **settings}), lambda progress: None)


def new_row(row: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> NewRow:
    return NewRow(
        row=row,
        epoch=0,
        request_id="",
        token_ids=np.array(tokens, "<i4").tobytes(),
        blocks=(blocks,),
        num_prompt_tokens=len(tokens),
        sampling=SamplingState(temperature=0.0),
    )


def step(worker: ModelWorker, row: int, start: int, count: int, **parts: object) -> StepResult:
    plan = StepPlan(step=0, engine_epoch=0, rows=(row,), epochs=(0,), starts=(start,), counts=(count,), **parts)
    return worker.collect(worker.launch(plan))


def generate(worker: ModelWorker, row: int, blocks: tuple[int, ...], *, start: int = 0, tokens: int = 6) -> list[int]:
    """Greedy; the first `start` positions are in the blocks already."""
    result = step(worker, row, start, len(PROMPT) - start, new_rows=(new_row(row, PROMPT, blocks),))
    found = list(result.tokens)
    while len(found) < tokens:
        found += step(worker, row, len(PROMPT) + len(found) - 1, 1).tokens
    return found


def forget(worker: ModelWorker, row: int) -> None:
    worker.collect(
        worker.launch(StepPlan(step=0, engine_epoch=0, rows=(), epochs=(), starts=(), counts=(), freed_rows=(row,)))
    )


@pytest.mark.parametrize("poison", ["off", "nan", "0x7f"])
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_what_comes_back_is_what_left(folder: Path, cache: str, poison: str) -> None:
    worker, ready = load(folder, kv_cache_dtype=cache, poison_memory=poison, enable_prefix_caching=poison == "off")
    assert ready.host_slots == 2**20 // bytes_of_block(worker.runner.cache)
    assert ready.tiers == ()
    driver, before = Driver(worker), tuple(range(6))
    expected = generate(worker, 0, before)
    driver.ok(*(move("store", block=block, place=10 + block) for block in range(FULL)))
    forget(worker, 0)
    generate(worker, 1, before)  # the blocks are another row's now
    forget(worker, 1)
    after = (20, 9, 17, 3, 5, 6)
    driver.ok(*(move("load", block=after[index], place=10 + index) for index in range(FULL)))
    assert generate(worker, 2, after, start=len(PROMPT) - 1) == expected
    worker.close()


def test_without_the_load_the_answer_is_another_one(folder: Path) -> None:
    """The test above looks at what it should: blocks of another prompt give other tokens."""
    worker, _ = load(folder)
    expected = generate(worker, 0, tuple(range(6)))
    step(worker, 1, 0, 16, new_rows=(new_row(1, tuple(range(90, 106)), (20, 9, 17, 3)),))
    assert generate(worker, 2, (20, 9, 17, 3, 5, 6), start=len(PROMPT) - 1) != expected
    worker.close()


def test_a_block_may_be_given_away_in_the_plan_that_stores_it(folder: Path) -> None:
    worker, _ = load(folder)
    driver = Driver(worker)
    expected = generate(worker, 0, tuple(range(6)))
    for turn in range(20):
        stores = [move("store", block=block, place=block) for block in range(FULL)]
        other = tuple(range(60 + turn, 76 + turn))
        result = step(
            worker,
            100 + turn,
            0,
            len(other),
            freed_rows=(0,) if not turn else (99 + turn,),
            transfers=tuple(stores),
            new_rows=(new_row(100 + turn, other, tuple(range(6))),),
        )
        driver.see(result)
        driver.ok(*(move("load", block=10 + index, place=index) for index in range(FULL)))
        assert all(driver.done[asked.transfer].ok for asked in stores)
        assert generate(worker, 50 + turn, (10, 11, 12, 13, 14, 15), start=len(PROMPT) - 1) == expected
        forget(worker, 50 + turn)
        driver.ok(*(move("load", block=index, place=index) for index in range(FULL)))
    worker.close()


@pytest.mark.parametrize("poison", ["off", "nan"])
def test_a_freed_block_is_stored_as_it_was(folder: Path, poison: str) -> None:
    """Without a prefix cache the debug allocator poisons it in the very plan that stores it."""
    worker, _ = load(folder, poison_memory=poison, enable_prefix_caching=False)
    driver = Driver(worker)
    expected = generate(worker, 0, tuple(range(6)))
    stores = tuple(move("store", block=block, place=block) for block in range(FULL))
    plan = StepPlan(step=0, engine_epoch=0, rows=(), epochs=(), starts=(), counts=(), freed_rows=(0,), transfers=stores)
    driver.see(worker.collect(worker.launch(plan)))
    driver.ok(*(move("load", block=6 + index, place=index) for index in range(FULL)))
    assert generate(worker, 1, tuple(range(6, 12)), start=len(PROMPT) - 1) == expected
    worker.close()


def test_a_damaged_place_is_not_loaded(folder: Path) -> None:
    worker, _ = load(folder)
    driver = Driver(worker)
    generate(worker, 0, tuple(range(6)))
    driver.ok(move("store", block=0, place=3))
    arena_of(worker)[3][17] ^= 4
    storage = worker.runner.cache.storage.view(torch.uint8)
    before = storage.clone()
    assert driver.error(move("load", block=9, place=3)) == "corrupt"
    assert torch.equal(storage, before)
    assert driver.tiers[0].corrupt == 1
    worker.close()


def test_the_host_tier_outlives_a_light_sleep_only(folder: Path) -> None:
    worker, ready = load(folder)
    driver = Driver(worker)
    expected = generate(worker, 0, tuple(range(6)))
    driver.ok(*(move("store", block=block, place=block) for block in range(FULL)))
    worker.command(SleepWorker(WITHOUT_CACHE), lambda progress: None)
    assert worker.command(WakeWorker(), lambda progress: None).ready == ready
    driver.ok(*(move("load", block=6 + index, place=index) for index in range(FULL)))
    assert generate(worker, 1, tuple(range(6, 12)), start=len(PROMPT) - 1) == expected
    worker.command(SleepWorker(EMPTY), lambda progress: None)
    assert arena_of(worker)._memory is None
    worker.command(WakeWorker(), lambda progress: None)
    expected = generate(worker, 2, tuple(range(6)))
    driver.ok(*(move("store", block=block, place=block) for block in range(FULL)))
    driver.ok(*(move("load", block=6 + index, place=index) for index in range(FULL)))
    assert generate(worker, 3, tuple(range(6, 12)), start=len(PROMPT) - 1) == expected
    worker.close()


def test_after_a_fault_nothing_old_is_answered(folder: Path) -> None:
    worker, _ = load(folder)
    generate(worker, 0, tuple(range(6)))
    transfers_of(worker).begin(
        StepPlan(
            step=0,
            engine_epoch=0,
            rows=(),
            epochs=(),
            starts=(),
            counts=(),
            transfers=tuple(move("store", block=block % 24, place=block) for block in range(100)),
        )
    )
    worker.reset()
    assert transfers_of(worker).collect(idle=True).transfers == ()
    driver = Driver(worker)
    expected = generate(worker, 0, tuple(range(6)))
    driver.ok(*(move("store", block=block, place=block) for block in range(FULL)))
    driver.ok(*(move("load", block=6 + index, place=index) for index in range(FULL)))
    assert generate(worker, 1, tuple(range(6, 12)), start=len(PROMPT) - 1) == expected
    worker.close()
    worker.close()


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (move("store", block=24), "block 24 of 24"),
        (move("store", block=-1), "block -1 of 24"),
        (move("load", block=0, place=2**20), "place 1048576 of"),
        (move("load", block=0, tier=1), "no load with tier 1"),
        (move("spill", key=b"k", tier=1), "no spill with tier 1"),
        (move("fetch", key=b"k"), "no fetch with tier 0"),
    ],
)
def test_plans_that_name_what_is_not_there(folder: Path, asked: object, why: str) -> None:
    worker, _ = load(folder)
    with pytest.raises(PlanError, match=why):
        Driver(worker).step(asked)
    worker.close()


def test_numbers_are_used_once_at_a_time(folder: Path) -> None:
    worker, _ = load(folder)
    asked = move("store", block=0)
    with pytest.raises(PlanError, match="is under way already"):
        Driver(worker).step(asked, asked)
    worker.close()


def test_without_host_memory_transfers_are_refused(folder: Path) -> None:
    worker, ready = load(folder, kv_offloading_size=None)
    assert ready.host_slots == 0
    with pytest.raises(PlanError, match="no tier to move blocks to"):
        Driver(worker).step(move("store", block=0))
    worker.close()


@pytest.mark.parametrize(
    ("settings", "param", "why"),
    [
        ({"kv_offloading_size": "512B"}, "kv_offloading_size", "do not hold one KV block"),
        ({"kv_offloading_size": 2**20}, "kv_offloading_size", "bytes of memory are free"),
    ],
)
def test_sizes_that_cannot_be(folder: Path, settings: dict[str, object], param: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        load(folder, **settings)
    assert raised.value.param == param


def test_a_machine_without_memory_opens_no_port(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: EngineConfig) -> None:
        raise ConfigError("kv_offloading_size: 1 bytes do not fit", param="kv_offloading_size")

    monkeypatch.setattr("troupellm.models.worker.open_kv_tiers.memory_left", refuse)
    shared = {"kv_connector": "tcp-peer", "kv_role": "kv_producer", "kv_connector_extra_config": {"listen": 0}}
    with pytest.raises(ConfigError, match="do not fit"):
        load(folder, kv_transfer_config=shared, prefix_hash_secret_file=str(tmp_path / "secret"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("troupellm-kv")]
