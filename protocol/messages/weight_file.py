"""The state of a file of weights, by which a worker tells whether they are those that another worker has read."""

import msgspec


class WeightFile(msgspec.Struct, frozen=True):
    """The state of a file that the weights were read from, which is quick to look up."""

    name: str
    size: int
    modified: int
    """Time of the last change, in nanoseconds; 0 of a small file, whose digest is that of all its content."""
    ends: str
    """Digest of its first and last bytes."""
