"""Images of a request: as the client sends them, as the media process prepares them, and their places in a prompt."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Literal

import msgspec

MediaKind = Literal["image"]


class MediaSource(msgspec.Struct, frozen=True, kw_only=True):
    """An image as the client sends it: its bytes, or where they are."""

    kind: MediaKind = "image"
    data: bytes = b""
    """The encoded file, such as a JPEG."""
    url: str = ""
    """http or https; used where `data` is empty."""
    field: str = ""
    """The place in the request that an error names."""


class MediaTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One input of an encoder."""

    name: str
    """Of the argument, as `transformers` calls it."""
    dtype: str
    """As numpy calls it."""
    shape: tuple[int, ...]
    data: bytes


class MediaItem(msgspec.Struct, frozen=True, array_like=True, kw_only=True, weakref=True):
    """A prepared image: what its encoder reads."""

    digest: bytes
    """32 bytes: names the pixels and how they were prepared, within one tenant."""
    kind: MediaKind = "image"
    num_vectors: int
    """Embeddings that the encoder makes of it."""
    grid: tuple[int, ...]
    """Rows and columns of its tiles, where an image is cut into tiles; its meaning is the family's own."""
    tensors: tuple[MediaTensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors)


class MediaSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive positions of a prompt that get embeddings of an item instead of those of tokens."""

    start: int
    count: int
    digest: bytes
    """Of the item."""
    first: int = 0
    """Which of the item's embeddings stands at `start`."""

    @property
    def end(self) -> int:
        return self.start + self.count


class MediaAbility(msgspec.Struct, frozen=True, kw_only=True):
    """The media that a worker can encode."""

    kinds: tuple[MediaKind, ...]
    cache_vectors: int
    """Embeddings of items that it keeps; no item may have more."""
    step_vectors: int
    """Embeddings that one step may make, where it encodes several items."""


def block_marks(spans: Iterable[MediaSpan], block_size: int) -> dict[int, bytes]:
    """By block of a prompt, bytes that name the embeddings in it; blocks of tokens alone have none.

    Placeholder tokens are equal for all images, so a block's name needs more than its tokens.
    """
    marks: dict[int, bytes] = {}
    for span in spans:
        for block in range(span.start // block_size, (span.end - 1) // block_size + 1):
            begin = max(span.start, block * block_size)
            end, first = min(span.end, (block + 1) * block_size), span.first + begin - span.start
            marks[block] = marks.get(block, b"") + sha256(span.digest + b"%d,%d,%d" % (begin, end, first)).digest()
    return marks


def count_vectors(spans: Sequence[MediaSpan]) -> int:
    """Positions that the spans take."""
    return sum(span.count for span in spans)
