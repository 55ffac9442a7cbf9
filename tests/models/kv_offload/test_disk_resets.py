"""A reset of the disk tier: the blocks that it forgets, with other operations in between."""

import os
from pathlib import Path

import pytest

from tests.models.kv_offload.test_disk import CONTEXT, KEYS, SIZE, SPACE, block, files, fill, open_store, read, store
from troupellm.models.kv_offload import disk_store
from troupellm.models.kv_offload.disk_store import LOCK_NAME, DiskStore
from troupellm.models.kv_offload.store import StoreContext, StoreError, StoreMiss
from troupellm.tests.support.engines.inside import folder_of

__all__ = ["store"]


def test_after_a_reset_nothing_older_is_found_in_this_life_or_the_next(store: DiskStore) -> None:
    fill(store, 0, 1, 2)
    store.reset()
    assert store.contains(KEYS) == 0
    assert files(folder_of(store)) == []
    assert store.use().used_bytes == store.use().evicted == 0
    fill(store, 1)
    with pytest.raises(StoreMiss):
        read(store, 0)
    store.close()
    again = open_store(folder_of(store))
    assert (again.contains(KEYS), again.contains(KEYS[1:])) == (0, 1)
    again.close()


def test_a_reset_leaves_the_blocks_of_other_models(tmp_path: Path) -> None:
    other = StoreContext(b"g" * 32, SIZE, 5.0)
    store = open_store(tmp_path)
    fill(store, 0, 1)
    store.close()
    store = open_store(tmp_path, context=other)
    fill(store, 0, 2, 3)
    store.reset()
    assert (store.contains(KEYS), len(files(tmp_path)), store.use().blocks) == (0, 2, 2)
    fill(store, 5)
    store.close()
    for context, number in ((CONTEXT, 0), (CONTEXT, 1), (other, 5)):
        store = open_store(tmp_path, context=context)
        assert read(store, number) == bytes(block(number))
        store.close()


def test_a_reset_without_the_folder_holds_for_whoever_opens_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 0)
    late = DiskStore(tmp_path, CONTEXT, 100 * SPACE)
    late.reset()  # the folder is the first one's
    store.close()
    late.probe()
    assert late.contains(KEYS) == 0
    late.close()


def test_what_a_reset_had_no_time_to_remove_is_not_found_and_gives_way_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_store, "RESET_SHARE", 0.0)
    store = open_store(tmp_path, blocks=4)
    fill(store, 0, 1, 2)
    store.reset()
    assert len(files(tmp_path)) == 3
    assert store.contains(KEYS) == 0
    fill(store, 2, 3)
    store.close()
    store = open_store(tmp_path, blocks=4)
    fill(store, 4)
    fill(store, 5)
    assert store.contains(KEYS[2:]) == 4, "the older ones have gone"
    assert len(files(tmp_path)) == 4
    store.close()


def test_what_is_being_written_while_it_is_reset_is_forgotten_too(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store._write_new

    def late(*what: object) -> None:
        monkeypatch.undo()
        store.reset()
        write(*what)

    monkeypatch.setattr(store, "_write_new", late)
    fill(store, 0)
    assert store.contains(KEYS) == 0


def test_a_generation_that_nobody_can_read_is_no_generation(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.reset()
    store.close()
    (found,) = tmp_path.glob("*.generation")
    found.write_bytes(b"short")
    with pytest.raises(StoreError, match="generation"):
        open_store(tmp_path)


def test_a_reset_touches_no_file_but_its_own(store: DiskStore) -> None:
    mine = folder_of(store) / "generation"
    mine.write_bytes(b"of another program")
    store.probe()
    store.reset()
    store.close()
    open_store(folder_of(store)).close()
    assert mine.read_bytes() == b"of another program"


def test_what_a_process_that_died_in_a_reset_left_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".troupellm-{'a' * 16}").write_bytes(b"half")
    open_store(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_half_a_generation_is_none(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: len(data) // 2)
        with pytest.raises(OSError, match="No space left"):
            store.reset()
    assert not list(folder_of(store).glob("*.generation"))
    store.reset()
    assert store.contains(KEYS) == 0
