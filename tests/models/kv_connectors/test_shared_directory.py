"""A folder of blocks that several engines share, with everything that others may do to it."""

import itertools
import os
import threading
from math import inf
from pathlib import Path

import pytest

from tests.models.kv_connectors.conftest import BLOCK, Open, content, key
from troupellm.models.kv_connectors import folder_scan, shared_directory
from troupellm.models.kv_connectors.shared_directory import ABANDONED_SECONDS, NAME, SUFFIX
from troupellm.models.kv_connectors.signed_block import HEADER_BYTES
from troupellm.models.kv_offload import disk_store_epoch
from troupellm.models.kv_offload.store import StoreCorrupt, StoreError, StoreMiss
from troupellm.protocol.errors import ConfigError
from troupellm.tests.support.engines.inside import signature_of

FRAME = HEADER_BYTES + BLOCK


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a folder is looked at to its end."""
    monkeypatch.setattr(shared_directory, "_LOOK_SHARE", inf)


def read(store: object, number: int) -> bytes:
    into = bytearray(BLOCK)
    store.get(key(number), memoryview(into))  # type: ignore[attr-defined]
    return bytes(into)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_one_engine_reads_what_another_wrote(connect: Open, tmp_path: Path) -> None:
    writer = connect(NAME, {"path": str(tmp_path)}, "kv_producer")
    reader = connect(NAME, {"path": str(tmp_path)}, "kv_consumer")
    writer.probe()
    for number in range(3):
        writer.put(key(number), memoryview(content(number)))
    assert reader.contains([key(0), key(1), key(2), key(3)]) == 3
    assert reader.contains([key(7), key(0)]) == 0
    assert [read(reader, number) for number in range(3)] == [content(number) for number in range(3)]
    with pytest.raises(StoreMiss):
        read(reader, 3)


def test_engines_with_other_secrets_or_models_share_no_block(connect: Open, tmp_path: Path) -> None:
    options = {"path": str(tmp_path)}
    connect(NAME, options).put(key(0), memoryview(content(0)))
    assert connect(NAME, options, fingerprint=b"n" * 32).contains([key(0)]) == 0
    with pytest.raises(StoreCorrupt):
        read(connect(NAME, options, secret=b"s" * 32), 0)


@pytest.mark.parametrize("place", [0, 10, 40, HEADER_BYTES - 1, HEADER_BYTES, FRAME - 1])
def test_a_damaged_file_is_a_miss_and_can_be_written_again(connect: Open, tmp_path: Path, place: int) -> None:
    store = connect(NAME, {"path": str(tmp_path)})
    store.put(key(0), memoryview(content(0)))
    (path,) = files(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(StoreCorrupt):
        read(store, 0)
    store.put(key(0), memoryview(content(0)))
    assert read(store, 0) == content(0)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES, FRAME - 1])
def test_half_a_file_is_a_miss(connect: Open, tmp_path: Path, size: int) -> None:
    store = connect(NAME, {"path": str(tmp_path)})
    store.put(key(0), memoryview(content(0)))
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    assert store.contains([key(0)]) == 0
    with pytest.raises(StoreCorrupt):
        read(store, 0)
    store.put(key(0), memoryview(content(0)))
    assert read(store, 0) == content(0)


def test_what_is_no_plain_file_is_a_miss(connect: Open, tmp_path: Path) -> None:
    store = connect(NAME, {"path": str(tmp_path)})
    store.put(key(0), memoryview(content(0)))
    (path,) = files(tmp_path)
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(StoreCorrupt, match="link"):
        read(store, 0)
    os.mkfifo(path)  # opening one for reading would wait for a writer
    with pytest.raises(StoreCorrupt, match="no block"):
        read(store, 0)
    assert outside.exists()


def test_the_folder_stays_within_its_limit(connect: Open, tmp_path: Path) -> None:
    limit = 32 * FRAME
    stores = [connect(NAME, {"path": str(tmp_path), "bytes": limit}) for _ in range(2)]
    for number in range(200):
        stores[number % 2].put(key(number), memoryview(content(number)))
        for path in files(tmp_path)[:1]:
            os.utime(path, (number, number))
        assert len(files(tmp_path)) * FRAME <= limit + 2 * limit // 16
    assert sum(store.use().evicted for store in stores) >= 200 - 36
    assert stores[0].use().capacity_bytes == limit


def test_very_many_files_are_looked_at_a_little_at_a_time(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = connect(NAME, {"path": str(tmp_path)})
    for number in range(100):
        full.put(key(number), memoryview(content(number)))
    monkeypatch.setattr(shared_directory, "_LOOK_SHARE", 0.05)
    store = connect(NAME, {"path": str(tmp_path), "bytes": 32 * FRAME}, timeout=200.0)
    clock = itertools.count().__next__  # a file takes a second
    for module in (shared_directory, folder_scan):
        monkeypatch.setattr(module, "monotonic", clock)
    touched: list[str] = []
    with monkeypatch.context() as watched:
        for call in ("lstat", "unlink"):
            real = getattr(os, call)
            watched.setattr(os, call, lambda path, real=real: touched.append(str(path)) or real(path))
        for number in range(100, 160):
            touched.clear()
            store.put(key(number), memoryview(content(number)))
            assert sum(path.endswith(SUFFIX) for path in touched) <= 12
    assert len(files(tmp_path)) <= 44
    assert store.use().evicted > 80


@pytest.mark.parametrize("most", [3, 8])
def test_more_files_than_are_remembered_give_way_by_and_by(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(folder_scan, "MOST_LEAVING", most)
    store = connect(NAME, {"path": str(tmp_path)})
    for number in range(20):
        store.put(key(number), memoryview(content(number)))
        path = next(path for path in files(tmp_path) if key(number).hex() in path.name)
        os.utime(path, (1000 + number, 1000 + number))
    store = connect(NAME, {"path": str(tmp_path), "bytes": 16 * FRAME})
    store.put(key(20), memoryview(content(20)))
    gone = min(most, 7)  # nine tenths of 16 stay
    assert [store.contains([key(number)]) for number in range(21)] == [0] * gone + [1] * (21 - gone)
    for number in range(21, 40):
        store.put(key(number), memoryview(content(number)))
    assert len(files(tmp_path)) <= 17


def test_the_longest_unused_go_first(connect: Open, tmp_path: Path) -> None:
    store = connect(NAME, {"path": str(tmp_path), "bytes": 16 * FRAME})
    for number in range(16):
        store.put(key(number), memoryview(content(number)))
        path = next(path for path in files(tmp_path) if key(number).hex() in path.name)
        os.utime(path, (1000 + number, 1000 + number))
    assert read(store, 0) == content(0)  # used now
    store.put(key(16), memoryview(content(16)))
    assert store.contains([key(0)]) == 1
    assert store.contains([key(1)]) == 0
    assert store.contains([key(16)]) == 1


def test_writers_readers_and_evictors_at_the_same_time(connect: Open, tmp_path: Path) -> None:
    options = {"path": str(tmp_path), "bytes": 24 * FRAME}
    begin, wrong, hits = threading.Barrier(4), list[object](), list[int]()

    def run(seed: int) -> None:
        store = connect(NAME, options)
        begin.wait()
        try:
            for step in range(150):
                number = (seed * 31 + step * 7) % 60
                store.put(key(number), memoryview(content(number)))
                wanted = (number + seed) % 60
                try:
                    if read(store, wanted) != content(wanted):
                        wrong.append(wanted)
                    hits.append(wanted)
                except StoreMiss as miss:
                    if isinstance(miss, StoreCorrupt):
                        wrong.append(miss)
        except Exception as error:  # shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert hits


def test_what_was_abandoned_half_written_is_removed(connect: Open, tmp_path: Path) -> None:
    store = connect(NAME, {"path": str(tmp_path)})
    store.put(key(9), memoryview(content(9)))
    folder = next(path for path in files(tmp_path)).parent
    old, young, foreign = (
        folder / name for name in (f".troupellm-{'0' * 16}", f".troupellm-{'1' * 16}", ".troupellm-x")
    )
    probed = folder.parent / f".troupellm-{'2' * 16}"
    for path in (old, young, foreign, probed):
        path.write_bytes(b"half")
        if path is not young:
            os.utime(path, (1, 1))
    assert ABANDONED_SECONDS > 60
    store = connect(NAME, {"path": str(tmp_path)})  # looks before long
    store.put(key(0), memoryview(content(0)))
    assert not old.exists()
    assert not probed.exists()
    assert young.exists()
    assert foreign.exists()


def test_strangers_are_left_alone_and_not_counted(connect: Open, tmp_path: Path) -> None:
    store = connect(NAME, {"path": str(tmp_path), "bytes": 16 * FRAME})
    store.put(key(0), memoryview(content(0)))
    ours = next(path for path in files(tmp_path)).parent
    named = next(path for path in files(tmp_path)).name
    elsewhere = tmp_path.with_name(tmp_path.name + " elsewhere")
    elsewhere.mkdir()
    (elsewhere / named).write_bytes(b"else")
    (ours.parent / "ff").symlink_to(elsewhere)
    strangers = [
        tmp_path / "main.kv",
        tmp_path / named,
        tmp_path / "screens" / "main.kv",
        tmp_path / "a1" / named,
        ours.parent / named,
        ours / "main.kv",
        ours / "deeper" / named,
        elsewhere / named,
    ]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(4 * FRAME))
        os.utime(path, (1, 1))
    (ours / f"{'ab' * 32}.kv").mkdir()
    for number in range(1, 60):
        store.put(key(number), memoryview(content(number)))
    assert all(path.exists() for path in strangers)
    assert store.use().evicted > 0
    assert store.use().used_bytes > 8 * FRAME


def test_an_unreadable_folder_of_another_user_disables_nothing(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, listdir = tmp_path / ("ab" * 16), os.listdir
    theirs.mkdir(mode=0o700)

    def refusing(folder: str | Path) -> list[str]:
        if Path(folder) == theirs:
            raise PermissionError(13, "Permission denied")
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", refusing)
    store = connect(NAME, {"path": str(tmp_path)})  # looks at the folder with its first block
    store.put(key(0), memoryview(content(0)))
    assert store.use().blocks == 1


def test_a_folder_that_looks_abandoned_disables_nothing(connect: Open, tmp_path: Path) -> None:
    store = connect(NAME, {"path": str(tmp_path)})
    store.put(key(0), memoryview(content(0)))
    strange = files(tmp_path)[0].parent / f".troupellm-{'0' * 16}"
    strange.mkdir()
    os.utime(strange, (1, 1))
    store = connect(NAME, {"path": str(tmp_path)})
    store.put(key(1), memoryview(content(1)))
    assert store.use().blocks == 2


def test_a_full_disk_leaves_nothing_behind(connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = connect(NAME, {"path": str(tmp_path)}), list[int]()

    def write(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_directory.os, "write", write)
    with pytest.raises(OSError, match="No space"):
        store.put(key(0), memoryview(content(0)))
    assert calls
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "path"),
        ({"path": ""}, "path"),
        ({"path": "x", "bytes": 10}, "bytes"),
        ({"path": "x", "bytes": "much"}, "bytes"),
        ({"path": "x", "size": 1}, "size"),
    ],
)
def test_wrong_options_are_refused_by_name(connect: Open, options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        connect(NAME, options)


def test_a_reset_by_one_engine_holds_for_all(connect: Open, tmp_path: Path) -> None:
    options = {"path": str(tmp_path)}
    one, other = connect(NAME, options), connect(NAME, options)
    stranger = connect(NAME, options, fingerprint=b"n" * 32)
    for store in (one, stranger):
        store.probe()
        store.put(key(0), memoryview(content(0)))
    assert other.contains([key(0)]) == 1
    other.reset()
    assert [store.contains([key(0)]) for store in (one, other, connect(NAME, options))] == [0, 0, 0]
    assert stranger.contains([key(0)]) == 1, "that of another model is not theirs"
    with pytest.raises(StoreMiss):
        read(one, 0)
    assert len([path for path in files(tmp_path) if path.suffix == ".kv"]) == 1
    one.put(key(0), memoryview(content(0)))
    assert read(other, 0) == content(0)


def test_what_a_reset_has_no_time_to_remove_is_not_found(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_directory, "_RESET_SHARE", -1.0)
    store = connect(NAME, {"path": str(tmp_path)})
    store.probe()
    for number in range(3):
        store.put(key(number), memoryview(content(number)))
    store.reset()
    assert len([path for path in files(tmp_path) if path.suffix == ".kv"]) == 3
    assert store.contains([key(0)]) == 0


def test_what_is_put_while_another_engine_resets_is_forgotten(
    connect: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = connect(NAME, {"path": str(tmp_path)}), connect(NAME, {"path": str(tmp_path)})
    one.probe()
    header = signature_of(one).header

    def late(*what: object) -> bytes:
        other.reset()
        return header(*what)

    monkeypatch.setattr(signature_of(one), "header", late)
    one.put(key(0), memoryview(content(0)))
    assert one.contains([key(0)]) == other.contains([key(0)]) == 0


def test_a_generation_that_is_no_file_is_an_error_and_is_not_waited_for(connect: Open, tmp_path: Path) -> None:
    store = connect(NAME, {"path": str(tmp_path)})
    store.probe()
    os.mkfifo(store._folder / disk_store_epoch.NAME)
    with pytest.raises(StoreError):
        store.contains([key(0)])
