"""Phi-3, Phi-3.5, Phi-4: Llama with merged projections in the checkpoint, and long or partial rotation."""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows, rope_section

ARCHITECTURES = ("Phi3ForCausalLM",)
DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
"""Values that the reference implementation assumes where config.json has none."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    if (stretch := rope_section(reader).values).get("rope_type", stretch.get("type")) == "yarn":
        # The models' own code once used the name yarn for a scaling that is longrope.
        reader = reader.without("rope_scaling").with_values(rope_parameters={**stretch, "rope_type": "longrope"})
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    plain = decoder_config(reader, windows=layer_windows(reader, window), rotary=1.0)
    return msgspec.structs.replace(plain, qkv_name="qkv_proj", gate_up_name="gate_up_proj")
