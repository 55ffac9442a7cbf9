"""SmolLM3: Llama with no rotation in every fourth layer."""

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows

ARCHITECTURES = ("SmolLM3ForCausalLM",)
DEFAULTS = {
    "num_key_value_heads": 4, "tie_word_embeddings": True, "no_rope_layer_interval": 4, "rope_theta": 2_000_000.0,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    bias = reader.flag("attention_bias", False)
    turned = rotated_layers(reader)
    plain = decoder_config(
        reader,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.flag("mlp_bias", False),
        windows=_windows(reader, turned),
    )
    return plain.with_layers(rope=tuple(plain.ropes[0] if turns else None for turns in turned))


def rotated_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Per layer: what `no_rope_layers` says (1 is with rotation), else all but each `no_rope_layer_interval`-th."""
    num_layers = reader.integer("num_hidden_layers")
    if not reader.has("no_rope_layers"):
        interval = reader.integer("no_rope_layer_interval")
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    listed = reader.values["no_rope_layers"]
    if not isinstance(listed, list) or len(listed) < num_layers or any(flag not in (0, 1) for flag in listed):
        raise reader.refuse("no_rope_layers", f"must be a list of {num_layers} zeros and ones")
    return tuple(bool(flag) for flag in listed[:num_layers])


def _windows(reader: ConfigReader, turned: tuple[bool, ...]) -> tuple[int | None, ...]:
    """`layer_types` decides, and without it `use_sliding_window`: then layers without rotation have a window."""
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    if reader.is_on("layer_types"):
        return layer_windows(reader, window)
    if not reader.flag("use_sliding_window", False):
        return (None,) * len(turned)
    return tuple(None if turns else window for turns in turned)
