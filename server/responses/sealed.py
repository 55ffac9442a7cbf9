"""Texts of this server's own that clients carry along unread and send back: `encrypted_content` of the responses API.

Some clients drop an item whose `encrypted_content` is null. The text is packed, not encrypted: it is the client's own
conversation.
"""

import base64
import binascii
import zlib

PREFIX = "trp1."
"""Says that the rest is base64url of zlib of UTF-8."""
MAX_SEALED_BYTES = 256 * 1024
"""Of a text."""
_MAX_LETTERS = MAX_SEALED_BYTES * 3 // 2
_QUICKLY = 1


def sealed(text: str) -> str | None:
    """A text in the form in which clients send it back; None where it is too long."""
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_SEALED_BYTES:
        return None
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(data, _QUICKLY)).decode().rstrip("=")


def is_sealed(value: object) -> bool:
    """Whether a value has the form of a text that `sealed` has packed; it may be damaged."""
    return isinstance(value, str) and value.startswith(PREFIX)


def unsealed(value: object, most_bytes: int = MAX_SEALED_BYTES) -> str | None:
    """The text that `sealed` has packed; None for any other value, however much it would unpack to.

    Args:
        most_bytes: a text that unpacks to more is refused, beside the bound of every text.
    """
    if not isinstance(value, str) or not value.startswith(PREFIX) or len(value) > _MAX_LETTERS:
        return None
    most = min(MAX_SEALED_BYTES, max(most_bytes, 0))
    packed = value.removeprefix(PREFIX)
    unpacking = zlib.decompressobj()
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), b"-_", validate=True)
        text = unpacking.decompress(data, most + 1)
        if len(text) > most or not unpacking.eof or unpacking.unused_data:
            return None
        return text.decode()
    except (binascii.Error, zlib.error, ValueError):
        return None
