"""Messages between an engine and a process that prepares images: one message is one frame."""

from typing import Any

import msgspec

from troupellm import __version__
from troupellm.protocol.messages.media import MediaTensor
from troupellm.protocol.wire.frames import MAX_FRAME_BYTES as MAX_FRAME_BYTES, Hello

LINK_VERSION = 1
HELLO = Hello(link="media", version=f"{__version__}/{LINK_VERSION}")

# To the process.


class LoadProcessor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the model's image processor; the first message, answered by `ProcessorLoaded`."""

    folder: str
    follow_links: bool = False
    """Also out of the folder."""
    settings: dict[str, Any] = {}
    """Over those of the processor's files."""
    max_pixels: int
    memory_bytes: int
    """More than now the process may never have."""


class PrepareImage(msgspec.Struct, frozen=True, tag=True):
    """Answered by `ImagePrepared` or `ImageRefused`, or by the process's death."""

    data: bytes


ToMedia = LoadProcessor | PrepareImage

# From the process.


class ProcessorLoaded(msgspec.Struct, frozen=True, tag=True):
    """Images can be prepared; or why not."""

    error: str | None = None


class ImagePrepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    digest: bytes
    """SHA-256 of mode, size and pixels before the processor, and of its settings."""
    num_vectors: int
    grid: tuple[int, ...]
    """As of `MediaItem`."""
    tensors: tuple[MediaTensor, ...]


class ImageRefused(msgspec.Struct, frozen=True, tag=True):
    """The image's own fault."""

    message: str


FromMedia = ProcessorLoaded | ImagePrepared | ImageRefused
