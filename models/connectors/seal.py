"""How a KV block looks outside of the engines that share a secret: a header, the block, and a tag over both.

Header, little-endian, 152 bytes: magic, version, length of the key, zeros, length of the block, fingerprint of the
model, key (zeros behind it), tag. The tag is HMAC-SHA-256 (RFC 2104) over what precedes it and the block. Whoever does
not know the secret can neither make a block that is accepted nor pass off one under another key: what is damaged,
foreign or forged is a miss.
"""

import hmac
import struct
from typing import Final

from troupellm.models.offload.store import StoreCorrupt

MAGIC: Final = b"TROUPESB"
VERSION: Final = 1
MOST_KEY_BYTES: Final = 64
FINGERPRINT_BYTES: Final = 32
TAG_BYTES: Final = 32
_FIELDS = struct.Struct(f"<8sHHIQ{FINGERPRINT_BYTES}s{MOST_KEY_BYTES}s")
HEADER_BYTES: Final = _FIELDS.size + TAG_BYTES

Buffer = bytes | bytearray | memoryview


class Seal:
    """Blocks of one model and one secret. Safe in any thread."""

    def __init__(self, key: bytes, fingerprint: bytes, block_bytes: int) -> None:
        """
        Raises:
            ValueError: the fingerprint is not 32 bytes.
        """
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        self._keyed = hmac.new(key, digestmod="sha256")
        self.fingerprint, self.block_bytes = fingerprint, block_bytes

    @property
    def frame_bytes(self) -> int:
        """Header and block."""
        return HEADER_BYTES + self.block_bytes

    def header(self, key: bytes, data: Buffer) -> bytes:
        """What goes in front of `data`.

        Raises:
            ValueError: a key of no or more than 64 bytes, or a block of another size.
        """
        fields = self._fields(key)
        if len(data) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        return fields + self._tag(fields, data)

    def check(self, key: bytes, header: Buffer, data: Buffer) -> None:
        """Whether `header` and `data` are the block of this key, from somebody who knows the secret.

        Raises:
            StoreCorrupt: they are not; its text says in what way.
        """
        if len(header) != HEADER_BYTES or len(data) != self.block_bytes:
            raise StoreCorrupt("short")
        fields = self._fields(key)
        if bytes(header[: _FIELDS.size]) != fields:
            raise StoreCorrupt("another block")
        if not hmac.compare_digest(bytes(header[_FIELDS.size :]), self._tag(fields, data)):
            raise StoreCorrupt("wrong tag")

    def _tag(self, fields: bytes, data: Buffer) -> bytes:
        tag = self._keyed.copy()
        tag.update(fields)
        tag.update(data)
        return tag.digest()

    def _fields(self, key: bytes) -> bytes:
        if not 0 < len(key) <= MOST_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MOST_KEY_BYTES} bytes, not {len(key)}")
        return _FIELDS.pack(MAGIC, VERSION, len(key), 0, self.block_bytes, self.fingerprint, key)
