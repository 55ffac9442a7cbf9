"""Which family file describes which architecture."""

from collections.abc import Callable
from pathlib import Path

from troupellm.models import llama, mistral, qwen2, qwen3
from troupellm.models.hf_config import FILE, ConfigReader, DecoderConfig, architecture_of
from troupellm.protocol.errors import ModelLoadError

FAMILIES: dict[str, Callable[[ConfigReader], DecoderConfig]] = {
    architecture: family.describe for family in (llama, mistral, qwen2, qwen3) for architecture in family.ARCHITECTURES
}


def describe_model(folder: Path) -> DecoderConfig:
    """Read and check config.json.

    Raises:
        ModelLoadError: no such file, an architecture that no family claims, or a wrong value.
    """
    reader = ConfigReader.load(folder)
    architecture = architecture_of(reader)
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"{FILE}: architecture {architecture} is not supported", hint=f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[architecture](reader)
