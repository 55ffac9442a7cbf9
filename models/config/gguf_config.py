"""A GGUF file's metadata as config.json has it."""

from typing import Any

from troupellm.models.config.gguf_architectures import ARCHITECTURES, Architecture
from troupellm.models.config.gguf_metadata import Metadata
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.gguf_header import Header
from troupellm.protocol.errors import ModelLoadError

PROJECTOR = "clip"
_MODEL = "model"
_KINDS = {
    "adapter": "a LoRA adapter",
    "mmproj": "the part of a model that sees images",
    "imatrix": "an importance matrix",
}
"""Values of `general.type` that mark a model; files without it count as models."""


def model_config(header: Header) -> dict[str, Any]:
    """The config.json that corresponds to the metadata.

    Raises:
        ModelLoadError: an architecture or a key that is not supported, or a value that is missing or wrong.
    """
    name, architecture = architecture_of(header)
    file = Metadata(header, name)
    found = architecture.config(file)
    file.refuse_unread()
    return found


def architecture_of(header: Header) -> tuple[str, Architecture]:
    """The name of the file's architecture and how such files are read.

    Raises:
        ModelLoadError: it is missing or not supported.
    """
    reader = ConfigReader(header.metadata, file=header.name)
    kind = plain_name(str(reader.values.get("general.type") or _MODEL))
    if kind != _MODEL:
        raise ModelLoadError(
            f"{header.name}: general.type {kind} is {_KINDS.get(kind, 'no language model')}",
            hint="give the GGUF file of the model itself",
        )
    if reader.values.get("general.architecture") == PROJECTOR:
        raise ModelLoadError(
            f"{header.name}: general.architecture {PROJECTOR} is the part of a model that sees images",
            hint="give the GGUF file of the model itself",
        )
    name = reader.choice("general.architecture", tuple(ARCHITECTURES))
    return name, ARCHITECTURES[name]
