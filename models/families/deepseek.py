"""DeepSeek V2 (with V2-Lite) and V3: latent attention, routed and shared experts; the first layers have no experts.

DeepSeek V3.2 and GLM-5 see `index_topk` keys that an indexer chooses. A sequence of no more tokens sees them all, as in
V3: they are served up to that length, without the indexer.
"""

import math

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MlaConfig, MoeConfig, RopeConfig
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config

SPARSE = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", *SPARSE)
NAMES = ExpertNames(shared="shared_experts")


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from the config.json of these families."""
    architecture = architecture_of(reader)
    third = architecture != ARCHITECTURES[0]
    reader = reader.with_defaults(first_k_dense_replace=3 if third else 0)
    if architecture not in SPARSE:
        interleaved = reader.flag("rope_interleave", True) if third else True
        return latent_decoder(reader, routed_experts(reader, third=third), interleaved=interleaved)
    if architecture == SPARSE[1]:
        reader = reader.with_defaults(n_group=1, topk_group=1, rms_norm_eps=1e-5)
    _check_dense_layers(reader)
    model = latent_decoder(reader, routed_experts(reader, third=True), interleaved=True)
    keys = reader.integer("index_topk", 2048)
    longest = min(model.max_position_embeddings, keys)
    return msgspec.structs.replace(model, sparse_keys=keys, max_position_embeddings=longest)


def _check_dense_layers(reader: ConfigReader) -> None:
    """
    Raises:
        ModelLoadError: other layers than the first ones have no experts.
    """
    kinds, count = reader.values.get("mlp_layer_types"), reader.integer("num_hidden_layers")
    dense = min(reader.integer("first_k_dense_replace", least=0), count)
    if kinds is not None and kinds != ["dense"] * dense + ["sparse"] * (count - dense):
        raise reader.refuse("mlp_layer_types", f"must name {dense} dense layers, then sparse ones")


def latent_decoder(reader: ConfigReader, moe: MoeConfig, *, interleaved: bool) -> DecoderConfig:
    """A decoder with latent attention.

    Args:
        interleaved: rotated pairs are neighbours.
    """
    mla = MlaConfig(
        latent=reader.integer("kv_lora_rank", 512),
        rotated=_even(reader, "qk_rope_head_dim", 64),
        plain=reader.integer("qk_nope_head_dim", 128),
        value=reader.integer("v_head_dim", 128),
        query_latent=reader.integer("q_lora_rank") if reader.is_on("q_lora_rank") else None,
    )
    bias = reader.flag("attention_bias", False)
    if bias and mla.query_latent is None:
        raise reader.refuse("attention_bias", "must be false where q_lora_rank is null")
    config = decoder_config(reader.with_values(head_dim=mla.rotated), qkv_bias=bias, out_bias=bias)
    return msgspec.structs.replace(
        config,
        rope_interleaved=interleaved,
        attention_scale=(mla.plain + mla.rotated) ** -0.5 * _stretched(config.ropes[0]) ** 2,
        mla=mla,
    ).with_layers(
        num_kv_heads=1,
        head_dim=mla.latent + mla.rotated,
        rotary_dim=mla.rotated,
        experts=behind_dense(reader, moe),
    )


def _even(reader: ConfigReader, key: str, default: int) -> int:
    size = reader.integer(key, default)
    if size % 2:
        raise reader.refuse(key, "must be even")
    return size


def _stretched(rope: RopeConfig) -> float:
    """The factor on queries and on keys for a context beyond the trained one (YaRN's mscale)."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def behind_dense(reader: ConfigReader, moe: MoeConfig) -> tuple[MoeConfig | None, ...]:
    """The experts of each layer: the first `first_k_dense_replace` ones have none."""
    if reader.integer("moe_layer_freq", 1) != 1:
        raise reader.refuse("moe_layer_freq", "must be 1")
    plain = reader.integer("first_k_dense_replace", 0, least=0)
    return tuple(moe if layer >= plain else None for layer in range(reader.integer("num_hidden_layers")))


def routed_experts(reader: ConfigReader, *, third: bool) -> MoeConfig:
    """Experts behind a router with groups, and a shared one.

    Args:
        third: sigmoids and a bias that counts while experts are chosen, as V3 has them; else V2's softmax.
    """
    experts, top_k = reader.integer("n_routed_experts"), reader.integer("num_experts_per_tok")
    if top_k > experts:
        raise reader.refuse("num_experts_per_tok", f"must be at most n_routed_experts ({experts})")
    size = reader.integer("moe_intermediate_size")
    shared = reader.integer("n_shared_experts", 1 if third else 2, least=0) * size
    if third:
        reader.choice("scoring_func", ("sigmoid",), "sigmoid")
        reader.choice("topk_method", ("noaux_tc",), "noaux_tc")
        grouped = True
    else:
        reader.choice("scoring_func", ("softmax",), "softmax")
        grouped = reader.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
        if reader.flag("norm_topk_prob", False):
            raise reader.refuse("norm_topk_prob", "must be false")
    groups = reader.integer("n_group", 8 if third else None) if grouped else 1
    top_groups = reader.integer("topk_group", 4 if third else None) if grouped else 1
    if experts % groups or (third and experts // groups < 2):
        raise reader.refuse("n_group", f"must divide n_routed_experts ({experts}) into equal groups")
    if top_groups > groups or top_k > top_groups * (experts // groups):
        raise reader.refuse("topk_group", f"must name enough of n_group ({groups}) groups for num_experts_per_tok")
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=size,
        scoring="sigmoid" if third else "softmax",
        renormalize=third and reader.flag("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 2.5 if third else 1.0),
        groups=groups,
        top_groups=top_groups,
        group_score="top2" if third else "max",
        choice_bias=third,
        wide_router=True,
        shared_size=shared,
        names=NAMES,
    )
