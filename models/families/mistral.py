"""Mistral: Llama with a sliding window in every layer, where `sliding_window` is set."""

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows

ARCHITECTURES = ("MistralForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(sliding_window=4096)  # as the models' own code; null is none
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    return decoder_config(reader, windows=layer_windows(reader, window))
