"""Idefics 3 and SmolVLM: an image is cut into tiles, and a small copy of the whole follows them.

The text around the tiles is that of `Idefics3Processor` of `transformers`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.media.family import Piece, Shapes
from troupellm.protocol.messages.media import MediaItem

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3:
    """As `MediaFamily`."""

    processor_options: Mapping[str, Any] = {"return_row_col_info": True}
    tensors = ("pixel_values", "pixel_attention_mask")

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a number is missing or wrong.
        """
        vision = reader.section("vision_config")
        side = vision.integer("image_size", 364) // vision.integer("patch_size", 14)
        self._per_tile = side * side // reader.integer("scale_factor", 2) ** 2

    def grid(self, made: Mapping[str, Any]) -> tuple[int, ...]:
        """Rows and columns of tiles beside the whole; 0 and 0 where the whole stands alone."""
        return int(made["rows"][0][0]), int(made["cols"][0][0])

    def num_vectors(self, shapes: Shapes) -> int:
        """As `MediaFamily.num_vectors`."""
        return shapes["pixel_values"][1] * self._per_tile

    def pieces(self, item: MediaItem) -> Sequence[Piece]:
        """As `MediaFamily.pieces`."""
        rows, columns = item.grid
        found: list[Piece] = []
        for row in range(rows):
            for column in range(columns):
                found += [f"{_AROUND}<row_{row + 1}_col_{column + 1}>", self._per_tile]
            found.append("\n" if row + 1 < rows else "\n\n")
        return (*found, f"{_AROUND}{_WHOLE}", self._per_tile, _AROUND)
