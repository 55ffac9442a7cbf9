"""The facts about a family of models that see images: its placeholder, and how many positions an image takes."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from troupellm.protocol.messages.media import MediaItem

Shapes = Mapping[str, tuple[int, ...]]
"""Of the image processor's tensors, by name."""
Piece = str | int
"""A text of tokens of the vocabulary, or a number of positions for embeddings."""


class MediaFamily(Protocol):
    """One family, described by the config of a checkpoint. Free of torch."""

    @property
    def processor_options(self) -> Mapping[str, Any]:
        """Arguments of the image processor's call."""

    @property
    def tensors(self) -> Sequence[str]:
        """Names of the processor's tensors that the encoder reads."""

    def grid(self, made: Mapping[str, Any]) -> tuple[int, ...]:
        """As of `MediaItem`, from all that the processor has made of one image."""

    def num_vectors(self, shapes: Shapes) -> int:
        """Embeddings of an image."""

    def pieces(self, item: MediaItem) -> Sequence[Piece]:
        """Stands in the place of an image's placeholder in the prompt."""
