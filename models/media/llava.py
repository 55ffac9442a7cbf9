"""LLaVA 1.5: one square picture, a vector per patch. Counts as in `LlavaProcessor` of `transformers`."""

from collections.abc import Mapping, Sequence
from typing import Any

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.media.family import Piece, Shapes
from troupellm.protocol.messages.media import MediaItem

_PATCH_SIZE = 14
"""Where config.json has none."""
_WITH_CLASS = "clip_vision_model"
TOWERS = (_WITH_CLASS, "siglip_vision_model")


def has_served_tower(reader: ConfigReader) -> bool:
    """False for a checkpoint of this architecture with another encoder, as Pixtral has: its text part is served."""
    return reader.section("vision_config").values.get("model_type", _WITH_CLASS) in TOWERS


class Llava:
    """As `MediaFamily`."""

    processor_options: Mapping[str, Any] = {}
    tensors = ("pixel_values",)

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a wrong number.
        """
        vision = reader.section("vision_config")
        kind = vision.values.get("model_type", _WITH_CLASS)
        self._patch = vision.integer("patch_size", _PATCH_SIZE)
        drops_first = reader.values.get("vision_feature_select_strategy", "default") == "default"
        self._more = int(kind == _WITH_CLASS) - int(drops_first)

    def grid(self, made: Mapping[str, Any]) -> tuple[int, ...]:
        """One tile."""
        return (1, 1)

    def num_vectors(self, shapes: Shapes) -> int:
        """As `MediaFamily.num_vectors`."""
        *_, height, width = shapes["pixel_values"]
        return (height // self._patch) * (width // self._patch) + self._more

    def pieces(self, item: MediaItem) -> Sequence[Piece]:
        """As `MediaFamily.pieces`."""
        return (item.num_vectors,)
