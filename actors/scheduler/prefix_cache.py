"""Names for the content of full KV blocks: a keyed hash chain over tokens.

    key[i] = SHA-256(secret || key[i - 1] || tokens of block i || extras),  key[-1] = 32 zero bytes

The KV of a block depends on every token before it, which the chain covers, and on what is not a token: adapter, media,
and by wish the tenant. Those are the `extras`: opaque here, the same for all blocks of a request. Secret, parent and
tokens have fixed lengths, so no two inputs spell the same bytes. The secret is drawn per engine and keys never leave
it: they cannot be predicted or searched for from outside.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

_ROOT = bytes(32)


def request_extras(*, adapter: int = 0, cache_salt: bytes = b"", media: Sequence[bytes] = ()) -> bytes:
    """What separates equal token prefixes, as bytes that no other combination spells. Empty for the plain case."""
    if not adapter and not cache_salt and not media:
        return b""
    parts = (struct.pack("<q", adapter), cache_salt, *media)
    return b"".join(struct.pack("<q", len(part)) + part for part in parts)


class PrefixHasher:
    """Computes block keys of one engine."""

    def __init__(self, secret: bytes, block_size: int) -> None:
        self._secret = sha256(secret).digest()
        self._block_size = block_size
        self._packer = struct.Struct(f"<{block_size}i")

    def extend(self, keys: list[bytes], prompt: bytes, tokens: Sequence[int], num_blocks: int, extras: bytes) -> None:
        """Append keys to `keys` (those of the blocks before) until it names the first `num_blocks` full blocks.

        Args:
            prompt: the first tokens once more, as int32: blocks in it need no packing.
        """
        size, width = self._block_size, self._packer.size
        packed = len(prompt) // width
        parent = keys[-1] if keys else _ROOT
        for index in range(len(keys), num_blocks):
            if index < packed:
                content = prompt[index * width : (index + 1) * width]
            else:
                content = self._packer.pack(*tokens[index * size : (index + 1) * size])
            parent = sha256(self._secret + parent + content + extras).digest()
            keys.append(parent)
