"""MiniMax M2: experts behind sigmoids, norms over whole queries and keys, and a rotation of a part of each head."""

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig
from troupellm.models.config.expert_config import expert_counts
from troupellm.models.config.hf_config import ConfigReader, decoder_config

ARCHITECTURES = ("MiniMaxM2ForCausalLM",)
NAMES = ExpertNames(
    blocks=("block_sparse_moe", "mlp"), choice_bias="e_score_correction_bias", gate="w1", up="w3", down="w2"
)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(rope_theta=5e6, head_dim=128, num_key_value_heads=8)
    _check(reader)
    if reader.has("rotary_dim"):
        part = reader.integer("rotary_dim") / reader.integer("head_dim")
        reader = reader.with_defaults(partial_rotary_factor=part)
    config = decoder_config(reader, qk_norm="full", rotary=1.0)
    num_experts, top_k = expert_counts(reader, 256, 8)
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("intermediate_size"),
        scoring="sigmoid",
        renormalize=True,
        choice_bias=True,
        names=NAMES,
    )
    return config.with_layers(experts=moe)


def _check(reader: ConfigReader) -> None:
    """Raises ModelLoadError for keys of the published files that ask for another computation."""
    reader.choice("scoring_func", ("sigmoid",), "sigmoid")
    reader.choice("qk_norm_type", ("per_layer",), "per_layer")
    for key in ("use_qk_norm", "use_routing_bias"):
        if not reader.flag(key, True):
            raise reader.refuse(key, "must be true")
    if reader.is_on("shared_intermediate_size"):
        raise reader.refuse("shared_intermediate_size", "must be 0")
    kinds = reader.values.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise reader.refuse("attn_type_list", "must hold ones: all layers attend to keys")
