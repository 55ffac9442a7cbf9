"""Texts that clients carry along unread: written, read back, damaged, and those of other servers."""

import base64
import zlib

import pytest

from troupellm.server.responses.sealed import MAX_SEALED_BYTES, PREFIX, sealed, unsealed


def packed(data: bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(data).decode()


@pytest.mark.parametrize("text", ["", "why", "naïve 🎉 \n" * 99, "x" * MAX_SEALED_BYTES, "a\ufffdb"])
def test_a_text_comes_back_as_it_was(text: str):
    sent = sealed(text)
    assert sent is not None
    assert sent.startswith(PREFIX)
    assert sent.isascii()
    assert unsealed(sent) == text
    assert unsealed(sent + "=" * (-len(sent.removeprefix(PREFIX)) % 4)) == text


def test_a_text_that_is_too_long_is_not_packed():
    assert sealed("x" * (MAX_SEALED_BYTES + 1)) is None
    assert sealed("é" * (MAX_SEALED_BYTES // 2 + 1)) is None


def test_a_text_beyond_the_room_that_is_left_is_not_unpacked():
    sent = sealed("x" * 10)
    assert (unsealed(sent, 10), unsealed(sent, 9), unsealed(sent, -1)) == ("x" * 10, None, None)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 5, "", "gAAAAABo", "trp2.AAAA", PREFIX, f"{PREFIX}AAAA", f"{PREFIX}!!!!", f"{PREFIX}é"),
        packed(zlib.compress(b"cut short")[:-3]),
        packed(zlib.compress(b"more") + b"behind"),
        packed(zlib.compress(b"\xff\xfe")),
        packed(zlib.compress(b"x" * (MAX_SEALED_BYTES + 1))),
        PREFIX + "A" * 2**20,
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_value_that_is_damaged_or_unpacks_to_too_much_has_no_text(value: object):
    assert unsealed(value) is None


def test_a_short_text_that_unpacks_to_64_mebibytes_is_not_unpacked():
    bomb = packed(zlib.compress(bytes(2**26), 9))
    assert len(bomb) < 2**17
    assert unsealed(bomb) is None
