"""Maps each architecture to the family file that describes it."""

import difflib
from collections.abc import Callable
from typing import Final

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.encoder_config import ENCODERS, OTHER_ENCODERS, runs_by_transformers
from troupellm.models.config.hf_config import FILE, ConfigReader, architecture_of
from troupellm.models.config.pooling_config import read_labels
from troupellm.models.families import (
    cohere2,
    deepseek,
    dots1,
    ernie,
    exaone,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4_moe,
    gpt_neox,
    gpt_oss,
    granite,
    lfm2,
    llama,
    llama4,
    mamba2,
    mimo_v2,
    minimax_m2,
    ministral,
    mistral,
    mixtral,
    nemotron,
    nemotron_h,
    olmo2,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_next,
    renamed,
    seed_oss,
    smollm3,
    starcoder2,
)
from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.plug_ins import find_plug_in, plug_in_error, plug_in_names
from troupellm.protocol.errors import ModelLoadError

Describe = Callable[[ConfigReader], DecoderConfig]
_FAMILIES = (
    llama,
    llama4,
    mistral,
    qwen2,
    qwen3,
    gemma2,
    gemma3,
    gemma4,
    phi3,
    granite,
    olmo2,
    glm,
    smollm3,
    mixtral,
    qwen2_moe,
    qwen3_moe,
    gpt_oss,
    deepseek,
    ministral,
    glm4_moe,
    mimo_v2,
    minimax_m2,
    exaone,
    seed_oss,
    gemma,
    ernie,
    dots1,
    renamed,
    cohere2,
    falcon,
    gpt_neox,
    phi,
    nemotron,
    starcoder2,
    lfm2,
    qwen3_next,
    mamba2,
    nemotron_h,
)
_WRITES = "ForCausalLM"
GROUP: Final = "troupellm.models"
"""Entry points of further families: the name of an architecture, and a function like `describe` of a family's file."""


def _architectures(attribute: str, ending: str) -> dict[str, Describe]:
    """The architectures that each family lists under `attribute`, else its generating ones with another ending."""
    return {
        architecture: family.describe
        for family in _FAMILIES
        for architecture in getattr(family, attribute, None) or _renamed(family.ARCHITECTURES, ending)
    }


def _renamed(architectures: tuple[str, ...], ending: str) -> list[str]:
    return [name.replace(_WRITES, ending) for name in architectures if name.endswith(_WRITES)]


FAMILIES: dict[str, Describe] = {name: family.describe for family in _FAMILIES for name in family.ARCHITECTURES}
BARE = _architectures("BARE", "Model")
"""The same decoders without a head: they embed."""
CLASSIFIERS = _architectures("CLASSIFIERS", "ForSequenceClassification")
"""And with a classifier that reads the last token."""


def has_family(reader: ConfigReader) -> bool:
    """True if a family claims the architecture."""
    architecture = architecture_of(reader)
    if architecture in FAMILIES or architecture in BARE or architecture in CLASSIFIERS:
        return True
    return architecture in plug_in_names(GROUP)


def describe_decoder(reader: ConfigReader) -> DecoderConfig:
    """Check config.json of a decoder.

    Raises:
        ModelLoadError: an architecture that no family claims, or a wrong value.
    """
    architecture = architecture_of(reader)
    if architecture in FAMILIES:
        return FAMILIES[architecture](reader)
    if architecture in BARE:
        return msgspec.structs.replace(BARE[architecture](reader), head="none")
    if architecture in CLASSIFIERS:
        labels = read_labels(reader)
        return msgspec.structs.replace(CLASSIFIERS[architecture](reader), head="score", num_labels=len(labels))
    describe = find_plug_in(GROUP, architecture)
    if describe is not None:
        return _described(describe, architecture, reader)
    supported = (*FAMILIES, *BARE, *CLASSIFIERS, *ENCODERS, *OTHER_ENCODERS, *plug_in_names(GROUP))
    near = difflib.get_close_matches(architecture[:80], supported, n=4, cutoff=0.0)
    hint = f"{len(supported)} architectures are supported; the closest names: {', '.join(near)}"
    if reader.is_on("auto_map"):
        raise ModelLoadError(
            f"{FILE}: {plain_name(architecture)} needs its own Python code (auto_map), which is never run", hint=hint
        )
    raise ModelLoadError(f"{FILE}: architecture {plain_name(architecture)} is not supported", hint=hint)


def _described(describe: Describe, architecture: str, reader: ConfigReader) -> DecoderConfig:
    """A plug-in's description.

    Raises:
        ModelLoadError: the plug-in refuses the config, or fails.
    """
    try:
        found: object = describe(reader)
    except Exception as error:  # a plug-in may raise anything
        raise plug_in_error(GROUP, architecture, error) from error
    if not isinstance(found, DecoderConfig):
        raise ModelLoadError(
            f"the plug-in {architecture} of {GROUP} must return a DecoderConfig, got {type(found).__name__}"
        )
    return found


def is_encoder(reader: ConfigReader) -> bool:
    """True for an encoder, be it of our own or run by the code of `transformers`."""
    return architecture_of(reader) in ENCODERS or runs_by_transformers(reader)
