"""Blocks in a folder: what is kept, what is refused, what gives way, what is found again."""

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from troupellm.models.kv_offload import disk_store
from troupellm.models.kv_offload.disk_store import LOCK_NAME, DiskStore
from troupellm.models.kv_offload.store import StoreContext, StoreCorrupt, StoreError, StoreMiss
from troupellm.tests.support.engines.inside import folder_of

SIZE = 10_000
SPACE = 12_288
CONTEXT = StoreContext(b"f" * 32, SIZE, 5.0)
KEYS = [bytes([number]) * 33 for number in range(20)]


def block(number: int) -> memoryview:
    return memoryview(bytes([number, 255 - number]) * (SIZE // 2))


def open_store(folder: Path, *, blocks: int = 100, context: StoreContext = CONTEXT) -> DiskStore:
    store = DiskStore(folder, context, blocks * SPACE)
    store.probe()
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = open_store(tmp_path / "blocks")
    yield store
    store.close()


def read(store: DiskStore, number: int) -> bytes:
    into = memoryview(bytearray(SIZE))
    store.get(KEYS[number], into)
    return bytes(into)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix == ".kv")


def file_of(store: DiskStore, number: int) -> Path:
    (found,) = [path for path in files(folder_of(store)) if path.name.startswith(KEYS[number].hex())]
    return found


def fill(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        store.put(KEYS[number], block(number))


def test_what_was_put_is_there(store: DiskStore) -> None:
    fill(store, 0, 1, 2)
    fill(store, 1)
    assert store.contains(KEYS[:3]) == 3
    assert store.contains(KEYS[:5]) == 3
    assert store.contains(KEYS[3:]) == 0
    assert store.contains([KEYS[0], KEYS[9], KEYS[1]]) == 1
    assert [read(store, number) for number in range(3)] == [bytes(block(number)) for number in range(3)]
    with pytest.raises(StoreMiss):
        read(store, 3)
    use = store.use()
    assert (use.blocks, use.used_bytes, use.capacity_bytes, use.evicted) == (3, 3 * SPACE, 100 * SPACE, 0)


def test_files_are_of_the_owner_alone(store: DiskStore) -> None:
    fill(store, 0)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder_of(store).iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE(folder_of(store).stat().st_mode) == 0o700


def test_a_new_process_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "USE_SECONDS", -1.0)
    store = open_store(tmp_path)
    fill(store, 0, 1, 2)
    read(store, 0)  # used last
    for number, path in enumerate((file_of(store, 1), file_of(store, 2), file_of(store, 0))):
        os.utime(path, ns=(number, number))
    store.close()
    again = open_store(tmp_path, blocks=3)
    assert again.contains(KEYS[:3]) == 3
    fill(again, 3)
    assert [again.contains([key]) for key in KEYS[:4]] == [1, 0, 1, 1]
    assert read(again, 0) == bytes(block(0))
    assert file_of(again, 0).stat().st_mtime > 1e9
    again.close()


def test_the_block_that_was_not_used_for_longest_gives_way(tmp_path: Path) -> None:
    store = open_store(tmp_path, blocks=3)
    fill(store, 0, 1, 2)
    read(store, 0)
    fill(store, 3)
    assert [store.contains([key]) for key in KEYS[:4]] == [1, 0, 1, 1]
    fill(store, 2, 4)  # there already: used
    assert [store.contains([key]) for key in KEYS[:5]] == [0, 0, 1, 1, 1]
    assert len(files(tmp_path)) == 3
    assert (store.use().evicted, store.use().used_bytes) == (2, 3 * SPACE)
    store.close()
    fewer = open_store(tmp_path, blocks=1)
    assert (len(files(tmp_path)), fewer.use().blocks) == (1, 1)
    fewer.close()


def test_a_flipped_bit_anywhere_is_a_miss(store: DiskStore) -> None:
    for bit in (0, 77, 8 * 50, 8 * 127 + 7, 8 * 128, 8 * (128 + SIZE) - 1):
        fill(store, 0)
        path = file_of(store, 0)
        content = bytearray(path.read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        with pytest.raises(StoreCorrupt):
            read(store, 0)
        assert files(folder_of(store)) == []
        assert store.contains(KEYS[:1]) == 0
    assert store.use().used_bytes == 0


@pytest.mark.parametrize("length", [0, 1, 127, 128, SIZE, SIZE + 127, SIZE + 129])
def test_a_file_of_another_length_is_a_miss(store: DiskStore, length: int) -> None:
    fill(store, 0)
    path = file_of(store, 0)
    path.write_bytes(path.read_bytes().ljust(length, b"\0")[:length])
    with pytest.raises(StoreCorrupt, match="short"):
        read(store, 0)
    assert not path.exists()


def test_a_misnamed_file_is_a_miss(store: DiskStore) -> None:
    fill(store, 0, 1)
    file_of(store, 0).rename(file_of(store, 1))
    with pytest.raises(StoreCorrupt, match="of another key"):
        read(store, 1)
    with pytest.raises(StoreMiss):
        read(store, 0)
    assert store.use().blocks == 0


def test_blocks_of_another_model_are_no_hit_and_give_way(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 0, 1)
    store.close()
    other = open_store(tmp_path, blocks=2, context=StoreContext(b"g" * 32, SIZE, 5.0))
    assert other.contains(KEYS[:1]) == 0
    assert other.use().blocks == 2
    path = files(tmp_path)[0]
    path.rename(path.with_name(path.name.replace(b"ffffffff".hex(), b"gggggggg".hex())))
    other.close()
    other = open_store(tmp_path, blocks=2, context=StoreContext(b"g" * 32, SIZE, 5.0))
    assert other.contains(KEYS[:1]) == 1
    with pytest.raises(StoreCorrupt, match="of another model"):
        read(other, 0)
    fill(other, 5, 6)
    assert other.use().blocks == len(files(tmp_path)) == 2
    other.close()


def test_strangers_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(b"precious")
    folder = tmp_path / "blocks"
    folder.mkdir()
    name = f"{KEYS[0].hex()}.{b'ffffffff'.hex()}.kv"
    (folder / "notes.txt").write_text("mine")
    (folder / ".0123456789abcdef.kv-new").write_bytes(b"half a block of a process that was killed")
    (folder / name).symlink_to(target)
    os.mkfifo(folder / f"{KEYS[1].hex()}.{b'ffffffff'.hex()}.kv")
    (folder / f"{KEYS[2].hex()}.{b'ffffffff'.hex()}.kv").mkdir()
    store = open_store(folder)
    assert store.contains(KEYS[:1]) == 0
    assert not (folder / ".0123456789abcdef.kv-new").exists()
    with pytest.raises(StoreMiss):
        fill(store, 2)  # there is a folder in the way
    fill(store, 0)  # takes the link's place
    assert read(store, 0) == bytes(block(0))
    path = file_of(store, 0)
    path.unlink()
    path.symlink_to(target)
    with pytest.raises(StoreMiss):
        read(store, 0)
    assert path.is_symlink()
    assert target.read_bytes() == b"precious"
    assert (folder / "notes.txt").read_text() == "mine"
    assert store.use() == open_after(store, folder)


def open_after(store: DiskStore, folder: Path) -> object:
    store.close()
    again = open_store(folder)
    use = again.use()
    again.close()
    return use


def test_a_file_that_went_is_a_miss(store: DiskStore) -> None:
    fill(store, 0)
    file_of(store, 0).unlink()
    with pytest.raises(StoreMiss):
        read(store, 0)
    assert store.contains(KEYS[:1]) == 0


def test_a_folder_belongs_to_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "LOCK_TRIES", 1)
    store = open_store(tmp_path)
    other = DiskStore(tmp_path, CONTEXT, 100 * SPACE)
    with pytest.raises(StoreError, match="another engine uses this folder"):
        other.probe()
    fill(store, 0)
    store.close()
    other.probe()
    assert read(other, 0) == bytes(block(0))
    other.close()
    assert (tmp_path / LOCK_NAME).exists()


def test_a_folder_that_goes_away_is_an_error_and_comes_again(store: DiskStore) -> None:
    fill(store, 0)
    for path in folder_of(store).iterdir():
        path.unlink()
    folder_of(store).rmdir()
    with pytest.raises(OSError, match="No such file"):
        fill(store, 1)
    store.probe()
    assert store.use().blocks == 0
    fill(store, 1)
    assert read(store, 1) == bytes(block(1))


def test_no_room_is_an_error_and_leaves_nothing(store: DiskStore) -> None:
    """A limit on file sizes stands for a full disk: the write ends in the middle."""
    fill(store, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            fill(store, 1)
        with pytest.raises(OSError, match="File too large"):
            store.probe()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(list(folder_of(store).iterdir())) == 2  # the block and the lock
    assert store.use().used_bytes == SPACE
    store.probe()
    fill(store, 1)
    assert read(store, 1) == bytes(block(1))


def test_without_permission_it_is_an_error(tmp_path: Path) -> None:
    """Root may do everything, so another user tries."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    folder = tmp_path / "blocks"
    script = f"""
import os, sys
from pathlib import Path
from troupellm.models.kv_offload.disk_store import DiskStore
from troupellm.models.kv_offload.store import StoreContext
folder = Path({str(folder)!r})
folder.mkdir()
os.chown(folder, 1000, 1000)
for parent in folder.parents[:-2]:
    os.chmod(parent, 0o755)
os.setegid(1000); os.seteuid(1000)
store = DiskStore(folder, StoreContext(b"f" * 32, {SIZE}, 5.0), {100 * SPACE})
store.probe()
store.put(b"k", memoryview(bytes({SIZE})))
path = next(folder.glob("*.kv"))
for mode, attempt in (
    (0o500, lambda: store.put(b"l", memoryview(bytes({SIZE})))),
    (0o600, lambda: store.get(b"k", memoryview(bytearray({SIZE})))),
):
    folder.chmod(mode)
    try:
        attempt()
    except PermissionError:
        print("refused")
folder.chmod(0o700)
store.probe()
store.get(b"k", memoryview(bytearray({SIZE})))
print("back")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["refused", "refused", "back"], ran.stderr


def test_no_more_names_than_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "MOST_BLOCKS", 4)
    store = open_store(tmp_path)
    fill(store, *range(8))
    assert store.use().blocks == len(files(tmp_path)) == 4
    store.close()
