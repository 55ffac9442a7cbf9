"""Sealed blocks: whole, of this key, of this model, from a writer that knows the secret; else a miss."""

import random

import pytest

from troupellm.models.kv_connectors.sealed_block import HEADER_BYTES, BlockSignature
from troupellm.models.kv_offload.store import StoreCorrupt

DATA = bytes(range(256)) * 2
SEAL = BlockSignature(b"k" * 32, b"f" * 32, len(DATA))


def test_what_was_sealed_is_accepted() -> None:
    header = SEAL.header(b"key", DATA)
    assert len(header) == HEADER_BYTES
    assert SEAL.frame_bytes == HEADER_BYTES + len(DATA)
    SEAL.check(b"key", header, memoryview(bytearray(DATA)))


def test_every_changed_bit_shows() -> None:
    frame = bytearray(SEAL.header(b"key", DATA) + DATA)
    places = [*range(8 * HEADER_BYTES), *random.Random(0).sample(range(8 * HEADER_BYTES, 8 * len(frame)), 500)]
    for place in places:
        frame[place // 8] ^= 1 << place % 8
        with pytest.raises(StoreCorrupt):
            SEAL.check(b"key", frame[:HEADER_BYTES], frame[HEADER_BYTES:])
        frame[place // 8] ^= 1 << place % 8


@pytest.mark.parametrize(
    "other",
    [
        BlockSignature(b"j" * 32, b"f" * 32, len(DATA)),  # another secret
        BlockSignature(b"k" * 32, b"g" * 32, len(DATA)),  # another model
    ],
)
def test_strangers_seals_are_refused(other: BlockSignature) -> None:
    with pytest.raises(StoreCorrupt):
        SEAL.check(b"key", other.header(b"key", DATA), DATA)


def test_a_block_under_another_key_is_refused() -> None:
    with pytest.raises(StoreCorrupt):
        SEAL.check(b"kez", SEAL.header(b"key", DATA), DATA)


@pytest.mark.parametrize("cut", [0, 1, HEADER_BYTES - 1])
def test_a_short_header_is_refused(cut: int) -> None:
    with pytest.raises(StoreCorrupt, match="short"):
        SEAL.check(b"key", SEAL.header(b"key", DATA)[:cut], DATA)


def test_wrong_sizes_are_the_callers_fault() -> None:
    for bad in (b"", b"x" * 65):
        with pytest.raises(ValueError, match="key"):
            SEAL.header(bad, DATA)
    with pytest.raises(ValueError, match="block"):
        SEAL.header(b"key", DATA[1:])
    with pytest.raises(ValueError, match="fingerprint"):
        BlockSignature(b"k" * 32, b"f" * 31, 16)
