"""A frame says what it holds, and any change of any of its bytes shows."""

import random

import pytest

from troupellm.models.kv_offload.block_format import HEADER_BYTES, Framing
from troupellm.models.kv_offload.store import StoreCorrupt, StoreMiss

KEY, OTHER_KEY = b"k" * 33, b"l" * 33
DATA = bytes(range(256)) * 4
FRAMING = Framing(b"f" * 32, len(DATA))


def test_what_was_framed_is_taken() -> None:
    header = FRAMING.header(KEY, DATA)
    assert len(header) == HEADER_BYTES == 128
    FRAMING.check(KEY, header, DATA)
    FRAMING.check(KEY, memoryview(bytearray(header)), memoryview(bytearray(DATA)))
    assert FRAMING.frame_bytes == len(header) + len(DATA)


def test_every_flipped_bit_is_found() -> None:
    frame = bytearray(FRAMING.header(KEY, DATA) + DATA)
    flips = [*range(HEADER_BYTES * 8), *random.Random(5).sample(range(HEADER_BYTES * 8, len(frame) * 8), 500)]
    for bit in flips:
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupt):
            FRAMING.check(KEY, frame[:HEADER_BYTES], frame[HEADER_BYTES:])
        frame[bit // 8] ^= 1 << bit % 8
    FRAMING.check(KEY, frame[:HEADER_BYTES], frame[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("framing", "key", "size", "why"),
    [
        (Framing(b"g" * 32, len(DATA)), KEY, len(DATA), "of another model"),
        (FRAMING, OTHER_KEY, len(DATA), "of another key"),
        (FRAMING, KEY, len(DATA) - 1, "short"),
        (Framing(b"f" * 32, len(DATA) // 2), KEY, len(DATA) // 2, "of another size"),
    ],
)
def test_what_is_another_block_is_a_miss(framing: Framing, key: bytes, size: int, why: str) -> None:
    with pytest.raises(StoreMiss, match=why):
        framing.check(key, FRAMING.header(KEY, DATA), DATA[:size])


def test_rubbish_is_a_miss() -> None:
    with pytest.raises(StoreCorrupt, match="no block"):
        FRAMING.check(KEY, bytes(HEADER_BYTES), DATA)
    with pytest.raises(StoreCorrupt, match="short"):
        FRAMING.check(KEY, b"", DATA)


@pytest.mark.parametrize("key", [b"", b"k" * 65])
def test_keys_have_a_length(key: bytes) -> None:
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        FRAMING.header(key, DATA)


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a block has 1024 bytes"):
        FRAMING.header(KEY, DATA[1:])
    with pytest.raises(ValueError, match="32 bytes"):
        Framing(b"short", 1)
