"""The form of a KV block outside of memory: a header that identifies it, and a checksum over both.

Header, little-endian, 128 bytes: magic, version, length of the key, zeros, length of the block, fingerprint of model
and layout, key (zeros behind it), checksum. The checksum is XXH3 (64 bit, https://xxhash.com) over the block, seeded
with that of the header in front of it, so one number covers all. It detects damage by media and incomplete writes.
Against attackers it gives no protection: file owners, modes and shared secrets do.
"""

import struct
from abc import ABC, abstractmethod
from typing import ClassVar, Final

from xxhash import xxh3_64_intdigest

from troupellm.models.kv_offload.store import StoreCorrupt

MAGIC: Final = b"TROUPEKV"
VERSION: Final = 1
MOST_KEY_BYTES: Final = 64
FINGERPRINT_BYTES: Final = 32
FIELDS: Final = struct.Struct(f"<8sHHIQ{FINGERPRINT_BYTES}s{MOST_KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES: Final = FIELDS.size + _CHECKSUM.size

Buffer = bytes | bytearray | memoryview


def checksum(data: Buffer, seed: int = 0) -> int:
    """XXH3 of the bytes; unsigned 64 bit. Tens of GB/s, without the interpreter's lock."""
    return xxh3_64_intdigest(data, seed)


class Headed(ABC):
    """Blocks of one model and layout with headers: fields that identify a block, and a proof over both."""

    magic: ClassVar[bytes]
    version: ClassVar[int]
    proof_bytes: ClassVar[int]

    def __init__(self, fingerprint: bytes, block_bytes: int) -> None:
        """
        Raises:
            ValueError: the fingerprint is not 32 bytes.
        """
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        self.fingerprint, self.block_bytes = fingerprint, block_bytes

    @property
    def frame_bytes(self) -> int:
        """Header and block."""
        return FIELDS.size + self.proof_bytes + self.block_bytes

    def header(self, key: bytes, data: Buffer) -> bytes:
        """The header that precedes `data`.

        Raises:
            ValueError: a key of no or more than 64 bytes, or a block of another size.
        """
        fields = self._fields(key)
        if len(data) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(data)}")
        return fields + self._proof(fields, data)

    @abstractmethod
    def check(self, key: bytes, header: Buffer, data: Buffer) -> None:
        """Check that `header` and `data` are the whole block of this key and this model.

        Raises:
            StoreCorrupt: they are not; its text names the fault.
        """

    @abstractmethod
    def _proof(self, fields: bytes, data: Buffer) -> bytes:
        """The bytes that follow the header's fields."""

    def _parts(self, header: Buffer, data: Buffer) -> tuple[bytes, bytes]:
        """Fields and proof of a header.

        Raises:
            StoreCorrupt: it or the block is too short or too long.
        """
        if len(header) != FIELDS.size + self.proof_bytes or len(data) != self.block_bytes:
            raise StoreCorrupt("short")
        return bytes(header[: FIELDS.size]), bytes(header[FIELDS.size :])

    def _fields(self, key: bytes) -> bytes:
        if not 0 < len(key) <= MOST_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MOST_KEY_BYTES} bytes, not {len(key)}")
        return FIELDS.pack(self.magic, self.version, len(key), 0, self.block_bytes, self.fingerprint, key)


class Framing(Headed):
    """Frames whose proof is a checksum."""

    magic, version, proof_bytes = MAGIC, VERSION, _CHECKSUM.size

    def check(self, key: bytes, header: Buffer, data: Buffer) -> None:
        fields, proof = self._parts(header, data)
        if fields != self._fields(key):
            raise StoreCorrupt(self._difference(fields))
        if proof != self._proof(fields, data):
            raise StoreCorrupt("wrong checksum")

    def _proof(self, fields: bytes, data: Buffer) -> bytes:
        return _CHECKSUM.pack(checksum(data, checksum(fields)))

    def _difference(self, fields: bytes) -> str:
        magic, version, _, _, length, fingerprint, _ = FIELDS.unpack(fields)
        if magic != MAGIC:
            return "no block"
        if version != VERSION:
            return f"version {version}"
        if fingerprint != self.fingerprint:
            return "of another model"
        return "of another size" if length != self.block_bytes else "of another key"
