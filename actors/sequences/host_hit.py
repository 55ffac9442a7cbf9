"""A block of a sequence's table that is to be loaded from host memory."""

from typing import NamedTuple


class HostHit(NamedTuple):
    group: int
    nth: int
    """In the sequence's table."""
    block: int
    key: bytes
    """Group included."""
    chained: bytes
    """The same without it."""
    parent: bytes
    """Key of the prefix before the block."""
    tokens: bytes
    """The block's own, int32."""
    cache_age: int
    """How often the prefix cache had been reset."""
