"""Granite: Llama with factors on embeddings, attention scores, additions to the residual, and logits.

Granite 4 has the architecture of a hybrid; its models whose layers are all attention, without experts, are served.
"""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config

HYBRID = "GraniteMoeHybrid"
ARCHITECTURES = ("GraniteForCausalLM", f"{HYBRID}ForCausalLM")
ATTENTION = ("attention", "full_attention")
SHARED = ((".mlp.gate_up_proj", ".shared_mlp.input_linear"), (".mlp.down_proj", ".shared_mlp.output_linear"))
"""Names of Granite 4's feed-forward part."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("attention_bias", False)
    hybrid = architecture_of(reader).startswith(HYBRID)
    if hybrid:
        reader = _all_attention(reader)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, mlp_bias=reader.flag("mlp_bias", False))
    if hybrid:
        turned = plain if reader.is_on("position_embedding_type") else plain.with_layers(rope=None)
        plain = msgspec.structs.replace(turned, gate_up_name="gate_up_proj", renamed=SHARED)
    return msgspec.structs.replace(
        plain,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        scale_inputs=True,
        residual_multiplier=reader.number("residual_multiplier", 1.0),
        attention_scale=reader.number("attention_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )


def _all_attention(reader: ConfigReader) -> ConfigReader:
    """The config with the width of the feed-forward part under its usual key.

    Raises:
        ModelLoadError: there are layers of another kind, or experts.
    """
    kinds = reader.values.get("layer_types") or reader.values.get("layers_block_type")
    if not isinstance(kinds, list) or any(kind not in ATTENTION for kind in kinds):
        raise reader.refuse("layer_types", f"may hold {' and '.join(ATTENTION)} alone: states are not built")
    if reader.integer("num_local_experts", 8, least=0):
        raise reader.refuse("num_local_experts", "must be 0: experts beside a feed-forward part are not built")
    if reader.values.get("position_embedding_type") == "nope":
        reader = reader.without("position_embedding_type")
    elif reader.is_on("position_embedding_type"):
        reader.choice("position_embedding_type", ("rope",))
    return reader.with_values(intermediate_size=reader.integer("shared_intermediate_size", 1024))
