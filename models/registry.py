"""Which family file describes which architecture."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from troupellm.models import gpt_oss, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from troupellm.models.decoder_config import DecoderConfig
from troupellm.models.encoder_config import ENCODERS
from troupellm.models.hf_config import FILE, ConfigReader, architecture_of
from troupellm.models.pooling_config import read_labels
from troupellm.protocol.errors import ModelLoadError

_WRITES = "ForCausalLM"
FAMILIES: dict[str, Callable[[ConfigReader], DecoderConfig]] = {
    architecture: family.describe
    for family in (llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, gpt_oss)
    for architecture in family.ARCHITECTURES
}
BARE = {name.replace(_WRITES, "Model"): describe for name, describe in FAMILIES.items()}
"""The same decoders without anything on top: they embed."""
CLASSIFIERS = {name.replace(_WRITES, "ForSequenceClassification"): describe for name, describe in FAMILIES.items()}
"""And with a classifier that reads the last token."""


def describe_model(folder: Path) -> DecoderConfig:
    """Read and check config.json of a decoder.

    Raises:
        ModelLoadError: no such file, an architecture that no family claims, or a wrong value.
    """
    return describe_decoder(ConfigReader.load(folder))


def describe_decoder(reader: ConfigReader) -> DecoderConfig:
    """The same, of a file that was read."""
    architecture = architecture_of(reader)
    if architecture in FAMILIES:
        return FAMILIES[architecture](reader)
    if architecture in BARE:
        return msgspec.structs.replace(BARE[architecture](reader), head="none")
    if architecture in CLASSIFIERS:
        labels = read_labels(reader)
        return msgspec.structs.replace(CLASSIFIERS[architecture](reader), head="score", num_labels=len(labels))
    supported = (*FAMILIES, *BARE, *CLASSIFIERS, *ENCODERS)
    raise ModelLoadError(
        f"{FILE}: architecture {architecture} is not supported", hint=f"supported: {', '.join(supported)}"
    )


def is_encoder(reader: ConfigReader) -> bool:
    return architecture_of(reader) in ENCODERS
