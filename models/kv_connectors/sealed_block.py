"""The form of a KV block outside of the engines that share a secret: a header, the block, and a tag over both.

Header, little-endian, 152 bytes: magic, version, length of the key, zeros, length of the block, fingerprint of the
model, key (zeros behind it), tag. The tag is HMAC-SHA-256 (RFC 2104) over all that precedes it and the block. Without
the secret it is impossible to make a block that is accepted, or to pass off a block under another key. A block that is
damaged, foreign or forged is a miss.
"""

import hmac
from typing import Final

from troupellm.models.kv_offload.block_format import FIELDS, Buffer, Headed
from troupellm.models.kv_offload.store import StoreCorrupt

MAGIC: Final = b"TROUPESB"
VERSION: Final = 1
TAG_BYTES: Final = 32
HEADER_BYTES: Final = FIELDS.size + TAG_BYTES


class BlockSignature(Headed):
    """Blocks whose proof requires the secret. Thread-safe."""

    magic, version, proof_bytes = MAGIC, VERSION, TAG_BYTES

    def __init__(self, key: bytes, fingerprint: bytes, block_bytes: int) -> None:
        """
        Raises:
            ValueError: the fingerprint is not 32 bytes.
        """
        super().__init__(fingerprint, block_bytes)
        self._keyed = hmac.new(key, digestmod="sha256")

    def check(self, key: bytes, header: Buffer, data: Buffer) -> None:
        fields, tag = self._parts(header, data)
        if fields != self._fields(key):
            raise StoreCorrupt("another block")
        if not hmac.compare_digest(tag, self._proof(fields, data)):
            raise StoreCorrupt("wrong tag")

    def _proof(self, fields: bytes, data: Buffer) -> bytes:
        tag = self._keyed.copy()
        tag.update(fields)
        tag.update(data)
        return tag.digest()
