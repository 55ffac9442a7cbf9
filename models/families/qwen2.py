"""Qwen2: Llama with biases on query, key and value, and an optional sliding window in the upper layers."""

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows

ARCHITECTURES = ("Qwen2ForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    return decoder_config(reader, qkv_bias=True, windows=upper_windows(reader))


def upper_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """`sliding_window` from layer `max_window_layers` up when `use_sliding_window` is set; `layer_types` overrides."""
    num_layers = reader.integer("num_hidden_layers")
    if not reader.flag("use_sliding_window", False) or not reader.is_on("sliding_window"):
        return (None,) * num_layers
    window = reader.integer("sliding_window")
    if reader.is_on("layer_types"):
        return layer_windows(reader, window)
    first = reader.integer("max_window_layers", 28, least=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))
