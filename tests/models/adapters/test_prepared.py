"""Adapters in host memory, and the slots that they are copied into."""

import os
from pathlib import Path

import msgspec
import torch

from troupellm.models.adapters.files import adapter_digest
from troupellm.models.adapters.prepared import PreparedAdapters
from troupellm.models.adapters.sites import decoder_sites
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.memory.plan import plan_memory
from troupellm.protocol.config.engine import CacheConfig, EngineConfig
from troupellm.protocol.config.lora import LoraConfig
from troupellm.tests.support.adapters.peft_folders import MODEL, WEIGHTS, write_adapter

LORA = LoraConfig(enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=2)


def prepared() -> PreparedAdapters:
    return PreparedAdapters(MODEL, LORA, torch.float32, None)


def slots_over(found: PreparedAdapters) -> AdapterSlots:
    return AdapterSlots(MODEL, found.find, num_slots=2, max_rank=8, dtype=torch.float32, device=torch.device("cpu"))


def test_a_prepared_adapter_is_found_by_its_digest_until_it_is_released(tmp_path: Path) -> None:
    tensors, store = write_adapter(tmp_path, MODEL), prepared()
    digest = adapter_digest(tmp_path)
    answer = store.prepare(digest, tmp_path)
    assert (answer.outcome, answer.error) == ("prepared", "")
    assert answer.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert store.find(digest) is not None
    store.release(digest)
    assert store.find(digest) is None


def test_one_that_is_there_is_not_read_again(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL)
    store, digest = prepared(), adapter_digest(tmp_path)
    store.prepare(digest, tmp_path)
    os.truncate(tmp_path / WEIGHTS, 0)
    assert store.prepare(digest, tmp_path).outcome == "prepared"


def test_files_that_have_changed_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL)
    digest = adapter_digest(tmp_path)
    write_adapter(tmp_path, MODEL, seed=1)
    answer = prepared().prepare(digest, tmp_path)
    assert answer.outcome == "refused"
    assert "have changed meanwhile; load it again" in answer.error


def test_a_file_that_cannot_be_served_costs_its_own_answer_alone(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good", MODEL)
    write_adapter(tmp_path / "large", MODEL, rank=9)
    store = prepared()
    refused = store.prepare(adapter_digest(tmp_path / "large"), tmp_path / "large")
    assert (refused.outcome, "rank 9" in refused.error) == ("refused", True)
    assert store.prepare("0" * 64, tmp_path / "nowhere").outcome == "refused"
    assert store.prepare(adapter_digest(tmp_path / "good"), tmp_path / "good").outcome == "prepared"


def test_host_memory_holds_no_more_than_was_configured(tmp_path: Path) -> None:
    store, digests = prepared(), []
    for seed in range(5):  # two, and two that are dropped soon
        write_adapter(tmp_path / str(seed), MODEL, seed=seed)
        digests.append(adapter_digest(tmp_path / str(seed)))
    outcomes = [store.prepare(digest, tmp_path / str(seed)).outcome for seed, digest in enumerate(digests)]
    assert outcomes == [*("prepared",) * 4, "refused"]
    store.release(digests[0])
    assert store.prepare(digests[4], tmp_path / "4").outcome == "prepared"


def test_a_slot_takes_the_next_adapter_whole(tmp_path: Path) -> None:
    write_adapter(tmp_path / "wide", MODEL, rank=8, lora_bias=True)
    write_adapter(tmp_path / "narrow", MODEL, ("v_proj",), rank=2)
    store = prepared()
    wide, narrow = (adapter_digest(tmp_path / name) for name in ("wide", "narrow"))
    store.prepare(wide, tmp_path / "wide")
    store.prepare(narrow, tmp_path / "narrow")
    used, fresh = slots_over(store), slots_over(store)
    assert used.fill(1, wide)
    assert used.fill(1, narrow)
    assert fresh.fill(1, narrow)
    for site in decoder_sites(MODEL):
        one, other = used.site(site.layer, site.name), fresh.site(site.layer, site.name)
        assert one.ranks.tolist() == other.ranks.tolist()
        assert torch.equal(one.down, other.down)
        assert all(torch.equal(up, same) for up, same in zip(one.ups, other.ups, strict=True))
        assert one.bias is None or not one.bias.any()


def test_slots_that_were_never_filled_hold_no_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path, MODEL)
    store, digest = prepared(), adapter_digest(tmp_path)
    store.prepare(digest, tmp_path)
    slots = slots_over(store)
    assert [slots.holds(number) for number in range(3)] == [True, False, False]
    assert not slots.fill(3, digest)
    assert not slots.fill(1, "0" * 64)
    assert slots.fill(2, digest)
    assert [slots.holds(number) for number in range(3)] == [True, False, True]


def test_the_memory_plan_counts_what_slots_take() -> None:
    slots = slots_over(prepared())
    taken = slots.num_bytes
    settings = EngineConfig(cache=CacheConfig(num_gpu_blocks_override=4))
    without, with_slots = (
        plan_memory(MODEL, config, torch.float32, available=2**30)
        for config in (settings, msgspec.structs.replace(settings, lora=LORA))
    )
    assert (without.adapter_bytes, with_slots.adapter_bytes) == (0, taken)
    assert without.free_bytes - with_slots.free_bytes == taken
    assert "adapters" in with_slots.table()
    assert "adapters" not in without.table()
