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


class Llava:
    """As `MediaFamily`."""

    processor_options: Mapping[str, Any] = {}
    tensors = ("pixel_values",)

    def __init__(self, reader: ConfigReader) -> None:
        """
        Raises:
            ModelLoadError: a tower that is not served, or a wrong number.
        """
        vision = reader.section("vision_config")
        kind = vision.values.get("model_type", _WITH_CLASS)
        if kind not in TOWERS:
            raise vision.refuse("model_type", f"must be one of {', '.join(TOWERS)}")
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
