"""LFM2: layers with a short convolution, and some with attention; the first versions' names of keys as well. Its models
with experts choose them by sigmoids and a bias.

The width of the feed-forward part is derived from the stated one, as Llama's first code did it.
"""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, LayerNorms, MoeConfig, ShortConvConfig
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config

ARCHITECTURES = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
ATTENTION, CONV = "full_attention", "conv"
NAMES = (
    (".mlp.gate_proj", ".feed_forward.w1"),
    (".mlp.up_proj", ".feed_forward.w3"),
    (".mlp.down_proj", ".feed_forward.w2"),
    (".self_attn.o_proj", ".self_attn.out_proj"),
    (".self_attn.q_norm", ".self_attn.q_layernorm"),
    (".self_attn.k_norm", ".self_attn.k_layernorm"),
    ("model.norm.", "model.embedding_norm."),
)
EXPERT_NAMES = ExpertNames(blocks=("feed_forward",), choice_bias="expert_bias", gate="w1", up="w3", down="w2")
MOST_TAPS = 16


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    hidden = reader.integer("hidden_size")
    for key in ("conv_dim", "conv_dim_out", "block_dim"):
        if reader.integer(key, hidden) != hidden:
            raise reader.refuse(key, f"must be hidden_size ({hidden})")
    for key in ("block_use_swiglu", "use_pos_enc"):
        if not reader.flag(key, True):
            raise reader.refuse(key, "must be true")
    taps = reader.integer("conv_L_cache", 3, least=2)
    if taps > MOST_TAPS:
        raise reader.refuse("conv_L_cache", f"must be an integer of at most {MOST_TAPS}")
    sparse = "Moe" in architecture_of(reader)
    tied = reader.flag("tie_embedding", reader.flag("tie_word_embeddings", True))
    wider = reader.with_values(
        intermediate_size=reader.integer("intermediate_size", 7168) if sparse else _intermediate_size(reader),
        rms_norm_eps=reader.number("norm_eps", 1e-5),
        tie_word_embeddings=tied,
        rope_theta=reader.values.get("rope_theta") or reader.values.get("theta") or 1_000_000.0,
        num_key_value_heads=reader.integer("num_key_value_heads", 8),
    )
    plain = decoder_config(wider, qk_norm="head").with_layers(mixer=_mixers(reader))
    if sparse:
        plain = plain.with_layers(experts=_experts(reader))
    return msgspec.structs.replace(
        plain,
        norms=LayerNorms(before_attention="operator_norm", before_feed_forward="ffn_norm"),
        short_conv=ShortConvConfig(taps=taps, bias=reader.flag("conv_bias", False)),
        renamed=NAMES,
    )


def _intermediate_size(reader: ConfigReader) -> int:
    """The width of the feed-forward part in the end."""
    size = reader.integer("block_ff_dim", reader.integer("intermediate_size", 12288))
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return size
    multiple = reader.integer("block_multiple_of", 256)
    adjusted = int(2 * size / 3)
    if reader.has("block_ffn_dim_multiplier") or "block_ffn_dim_multiplier" not in reader.values:
        adjusted = int(reader.number("block_ffn_dim_multiplier", 1.0) * adjusted)
        adjusted = multiple * -(-adjusted // multiple)
    return adjusted


def _experts(reader: ConfigReader) -> tuple[MoeConfig | None, ...]:
    """The experts of all layers but the first ones."""
    num_layers, dense = reader.integer("num_hidden_layers"), reader.integer("num_dense_layers", 2, least=0)
    experts, top_k = reader.integer("num_experts", 32), reader.integer("num_experts_per_tok", 4)
    if top_k > experts:
        raise reader.refuse("num_experts_per_tok", f"must be at most num_experts ({experts})")
    moe = MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=reader.integer("moe_intermediate_size", 1792),
        scoring="sigmoid",
        renormalize=reader.flag("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 1.0),
        choice_bias=reader.flag("use_expert_bias", True),
        names=EXPERT_NAMES,
    )
    return tuple(None if layer < dense else moe for layer in range(num_layers))


def _mixers(reader: ConfigReader) -> tuple[str, ...]:
    """Per layer, the part that mixes its positions."""
    num_layers = reader.integer("num_hidden_layers")
    kinds, indices = reader.values.get("layer_types"), reader.values.get("full_attn_idxs")
    if kinds is None:
        indices = list(range(num_layers)) if indices is None else indices
        if not isinstance(indices, list) or not all(type(each) is int and 0 <= each < num_layers for each in indices):
            raise reader.refuse("full_attn_idxs", f"must be a list of layers below num_hidden_layers ({num_layers})")
        kinds = [ATTENTION if layer in indices else CONV for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (ATTENTION, CONV) for kind in kinds):
        raise reader.refuse("layer_types", f"must be a list of {num_layers} names, {ATTENTION} or {CONV}")
    if ATTENTION not in kinds:
        raise reader.refuse("layer_types", f"must name {ATTENTION} at least once")
    return tuple("attention" if kind == ATTENTION else "short_conv" for kind in kinds)
