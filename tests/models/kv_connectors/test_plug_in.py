"""A plug-in's store: its blocks are sealed, and every wrong or late answer of it is a miss or an error."""

import threading
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.models.kv_connectors.conftest import BLOCK, FINGERPRINT, SECRET, content, key
from troupellm.models.kv_connectors import plugin
from troupellm.models.kv_connectors.plugin import PlugInStore
from troupellm.models.kv_connectors.signed_block import BlockSignature
from troupellm.models.kv_offload.store import BlockStore, StoreCorrupt, StoreError, StoreMiss, StoreUse

SEAL = BlockSignature(SECRET, FINGERPRINT, BLOCK)


class Kept(BlockStore):
    """Frames in memory."""

    def __init__(self) -> None:
        self.frames: dict[bytes, bytes] = {}
        self.closed = False

    def contains(self, keys: Sequence[bytes]) -> int:
        return next((count for count, each in enumerate(keys) if each not in self.frames), len(keys))

    def put(self, key: bytes, data: memoryview) -> None:
        self.frames[key] = bytes(data)

    def get(self, key: bytes, into: memoryview) -> None:
        if key not in self.frames:
            raise StoreMiss
        into[:] = self.frames[key]

    def reset(self) -> None:
        self.frames.clear()

    def use(self) -> StoreUse:
        return StoreUse(blocks=len(self.frames), used_bytes=sum(map(len, self.frames.values())))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def store(kept: Kept) -> PlugInStore:
    """Around `kept`, with three blocks."""
    store = PlugInStore(kept, SEAL)
    store.name = "toy"
    for number in range(3):
        store.put(key(number), memoryview(content(number)).toreadonly())
    return store


def read(store: BlockStore, number: int) -> bytes:
    into = bytearray(BLOCK)
    store.get(key(number), memoryview(into))
    return bytes(into)


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise error

    return call


def test_blocks_leave_sealed_and_come_back_as_they_were(store: PlugInStore, kept: Kept) -> None:
    assert {len(frame) for frame in kept.frames.values()} == {SEAL.frame_bytes}
    assert store.contains([key(0), key(2), key(7), key(1)]) == 2
    assert [read(store, number) for number in range(3)] == [content(number) for number in range(3)]
    with pytest.raises(StoreMiss) as missed:
        read(store, 7)
    assert missed.type is StoreMiss
    assert store.use() == StoreUse(blocks=3, used_bytes=3 * SEAL.frame_bytes)
    store.reset()
    assert store.contains([key(0)]) == store.use().blocks == 0


def of_another_secret(frames: dict[bytes, bytes]) -> bytes:
    return BlockSignature(b"j" * 32, FINGERPRINT, BLOCK).header(key(0), content(0)) + content(0)


def of_another_model(frames: dict[bytes, bytes]) -> bytes:
    return BlockSignature(SECRET, b"n" * 32, BLOCK).header(key(0), content(0)) + content(0)


def damaged(frames: dict[bytes, bytes]) -> bytes:
    return frames[key(0)][:-1] + bytes([frames[key(0)][-1] ^ 1])


@pytest.mark.parametrize(
    "lie",
    [
        of_another_secret,
        of_another_model,
        damaged,
        lambda frames: frames[key(1)],
        lambda frames: frames[key(0)][: BLOCK // 2],
        lambda frames: bytes(SEAL.frame_bytes),
        lambda frames: b"",
    ],
)
def test_what_is_not_the_block_that_was_put_is_a_miss(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch, lie: Callable[[dict[bytes, bytes]], bytes]
) -> None:
    def get(key: bytes, into: memoryview) -> None:
        frame = lie(kept.frames)
        into[: len(frame)] = frame

    assert read(store, 0) == content(0)
    monkeypatch.setattr(kept, "get", get)
    with pytest.raises(StoreCorrupt):
        read(store, 0)


def test_bytes_that_a_plug_in_writes_after_its_answer_are_not_read(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[memoryview] = []

    def get(key: bytes, into: memoryview) -> None:
        into[:] = kept.frames[key]
        given.append(into)

    monkeypatch.setattr(kept, "get", get)
    into = bytearray(BLOCK)
    store.get(key(0), memoryview(into))
    given[0][:] = bytes(SEAL.frame_bytes)
    assert into == content(0)


@pytest.mark.parametrize("count", [0, 2, 3, True, np.int64(2)])
def test_an_answer_is_a_number_of_the_keys(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch, count: Any
) -> None:
    monkeypatch.setattr(kept, "contains", lambda keys: count)
    answer = store.contains([key(0), key(1), key(2)])
    assert (answer, type(answer)) == (count, int)


@pytest.mark.parametrize("count", [None, -1, 4, 2.5, "3", [1], pytest.param(10**6000, id="huge")])
def test_any_other_answer_is_an_error(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch, count: Any
) -> None:
    monkeypatch.setattr(kept, "contains", lambda keys: count)
    with pytest.raises(StoreError):
        store.contains([key(0), key(1), key(2)])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("/a/path"), "RuntimeError"),
        (StopIteration(), "StopIteration"),
        (SystemExit(1), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (CancelledError(), "CancelledError"),
        (StoreError("the store is full"), "the store is full"),
        (StoreError("in \udc80"), r"in \udc80"),
        (OSError(28, "No space left on device", "/a/path"), "No space left on device"),
        (OSError("odd"), "OSError"),
        (OSError(5, 17), "17"),
    ],
)
@pytest.mark.parametrize("name", ["contains", "put", "get", "reset", "probe"])
def test_every_exception_of_a_plug_in_becomes_a_store_error_in_plain_words(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException, said: str
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "contains": lambda: store.contains([key(0)]),
        "put": lambda: store.put(key(0), memoryview(content(0))),
        "get": lambda: read(store, 0),
        "reset": store.reset,
        "probe": store.probe,
    }
    monkeypatch.setattr(kept, name, raising(error))
    with pytest.raises(StoreError) as caught:
        calls[name]()
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "use",
    [
        raising(RuntimeError()),
        lambda: None,
        lambda: StoreUse(blocks=2.5),
        lambda: StoreUse(used_bytes=-1),
        lambda: StoreUse(capacity_bytes=2**63),
    ],
)
def test_wrong_numbers_are_an_error_beside_the_step(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch, use: Callable[[], Any]
) -> None:
    before = store.use()
    monkeypatch.setattr(kept, "use", use)
    for call in (store.reset, store.probe, lambda: store.put(key(7), memoryview(content(7)))):
        with pytest.raises(StoreError):
            call()
    assert store.use() == before


def test_closing_a_store_closes_its_plug_in(store: PlugInStore, kept: Kept) -> None:
    store.close()
    assert kept.closed


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(1)])
def test_one_that_cannot_be_closed_is_told_of(
    store: PlugInStore,
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    monkeypatch.setattr(kept, "close", raising(error))
    store.close()
    assert "the connector toy could not be closed" in caplog.text


def test_one_that_hangs_in_its_close_is_left_behind(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, ended = threading.Event(), threading.Event()

    def close() -> None:
        gate.wait()
        ended.set()

    monkeypatch.setattr(plugin, "CLOSE_SECONDS", 0.0)
    monkeypatch.setattr(kept, "close", close)
    store.close()
    assert "the connector toy does not close" in caplog.text
    gate.set()
    assert ended.wait(60.0)


def test_numbers_that_do_not_come_hold_up_no_other_call(
    store: PlugInStore, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one call that hangs would take the tier's other thread along, and no probe would ever end."""
    gate, asked = threading.Event(), threading.Event()

    def hang() -> StoreUse:
        asked.set()
        gate.wait()
        return StoreUse(blocks=99)

    with monkeypatch.context() as patch:
        patch.setattr(kept, "use", hang)
        hanging = threading.Thread(target=store.probe, daemon=True)
        hanging.start()
        assert asked.wait(60.0)
    other = threading.Thread(target=store.probe, daemon=True)
    other.start()
    other.join(60.0)
    ended = not other.is_alive()
    gate.set()
    hanging.join(60.0)
    assert ended
    assert store.use().blocks == 3
