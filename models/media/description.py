"""Which checkpoints see images here, and what an engine knows of them before any weight is read. Free of torch."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.media.family import MediaFamily
from troupellm.models.media.idefics3 import Idefics3
from troupellm.models.media.llava import Llava, has_served_tower
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.errors import ModelLoadError

FAMILIES: Final[Mapping[str, Callable[[ConfigReader], MediaFamily]]] = {
    "LlavaForConditionalGeneration": Llava,
    "Idefics3ForConditionalGeneration": Idefics3,
    "SmolVLMForConditionalGeneration": Idefics3,
}
"""By architecture."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
INSTALL = 'pip install -e ".[vision]" in a clone of troupellm'
EXTRA = f"models that see images need pillow and transformers to take them: {INSTALL}"
_PACKAGES = ("transformers", "PIL")


class MediaModel(msgspec.Struct, frozen=True):
    """A checkpoint that sees images."""

    architecture: str
    family: MediaFamily
    token_id: int
    """Stands for an image in the rendered prompt, and for each of its embeddings in the tokens."""


def describe_media(folder: Path, config: MediaConfig) -> MediaModel | None:
    """The description of a checkpoint that sees images; None where text alone is served.

    Raises:
        ModelLoadError: config.json has a wrong value.
    """
    if config.language_model_only or is_gguf(folder) or not (folder / "config.json").is_file():
        return None
    reader = ConfigReader.load(folder)
    names = reader.values.get("architectures")
    name = next((name for name in names if name in FAMILIES), None) if isinstance(names, list) else None
    if name is None or missing_packages():
        return None
    if not any((folder / file).is_file() for file in PROCESSOR_FILES):
        return None
    if FAMILIES[name] is Llava and not has_served_tower(reader):
        return None
    key = next((key for key in ("image_token_id", "image_token_index") if reader.has(key)), None)
    if key is None:
        raise ModelLoadError("config.json: image_token_id is missing", hint="it is the placeholder of an image")
    return MediaModel(name, FAMILIES[name](reader), reader.integer(key))


def text_only(name: str, config: MediaConfig) -> str:
    """A sentence for a client that sends an image to a model that takes none."""
    if config.language_model_only:
        return f"the model {name} is served without images (language_model_only)"
    return f"the model {name} reads text only" + (f"; {EXTRA}" if missing_packages() else "")


def missing_packages() -> bool:
    """True if a package that images need is not installed; none is imported."""
    return any(find_spec(name) is None for name in _PACKAGES)
