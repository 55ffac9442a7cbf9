"""Granite: Llama with factors on embeddings, attention scores, additions to the residual, and logits.

Granite 4 is a hybrid of state-space layers and attention, mostly without rotation, and some of its models have experts
beside a part that all tokens share.
"""

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig, SsdConfig
from troupellm.models.config.expert_config import expert_counts
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config
from troupellm.models.config.ssd_keys import groups_of, step_limits

HYBRID = "GraniteMoeHybrid"
ARCHITECTURES = ("GraniteForCausalLM", f"{HYBRID}ForCausalLM")
ATTENTION, STATES = ("attention", "full_attention"), ("mamba", "linear_attention")
SHARED = ((".mlp.gate_up_proj", ".shared_mlp.input_linear"), (".mlp.down_proj", ".shared_mlp.output_linear"))
"""Names of Granite 4's feed-forward part."""
BLOCK, SHARED_PART = "block_sparse_moe", "shared_mlp"
EXPERTS = (
    (f".{BLOCK}.{SHARED_PART}.gate_up_proj", f".{SHARED_PART}.input_linear"),
    (f".{BLOCK}.{SHARED_PART}.down_proj", f".{SHARED_PART}.output_linear"),
    (f".{BLOCK}.experts.gate_up_proj", f".{BLOCK}.input_linear.weight"),
    (f".{BLOCK}.experts.down_proj", f".{BLOCK}.output_linear.weight"),
)
"""The same beside experts, and those of the experts."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    bias = reader.flag("attention_bias", False)
    hybrid = architecture_of(reader).startswith(HYBRID)
    if hybrid:
        reader = _with_usual_keys(reader)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, mlp_bias=reader.flag("mlp_bias", False))
    if hybrid:
        turned = plain if reader.is_on("position_embedding_type") else plain.with_layers(rope=None)
        plain = msgspec.structs.replace(turned, gate_up_name="gate_up_proj", renamed=SHARED)
        if reader.integer("num_local_experts", 8, least=0):
            plain = msgspec.structs.replace(plain, renamed=EXPERTS).with_layers(experts=_experts(reader))
        mixers = _mixers(reader)
        if "ssd" in mixers:
            plain = msgspec.structs.replace(plain, ssd=_ssd(reader)).with_layers(mixer=mixers)
    return msgspec.structs.replace(
        plain,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        scale_inputs=True,
        residual_multiplier=reader.number("residual_multiplier", 1.0),
        attention_scale=reader.number("attention_multiplier", 1.0),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )


def _with_usual_keys(reader: ConfigReader) -> ConfigReader:
    """The config with the width of the part that all tokens share under its usual key.

    Raises:
        ModelLoadError: there is another kind of positions.
    """
    if reader.values.get("position_embedding_type") == "nope":
        reader = reader.without("position_embedding_type")
    elif reader.is_on("position_embedding_type"):
        reader.choice("position_embedding_type", ("rope",))
    shared = reader.integer("shared_intermediate_size", 1024)
    return reader.with_values(intermediate_size=shared, expert_size=reader.integer("intermediate_size", 11008))


def _experts(reader: ConfigReader) -> MoeConfig:
    num_experts, top_k = expert_counts(reader, 8, 2)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("expert_size"),
        scoring="softmax_of_chosen",
        shared_size=reader.integer("intermediate_size"),
        names=ExpertNames(blocks=(BLOCK,), router="router.layer", shared=SHARED_PART),
    )


def _mixers(reader: ConfigReader) -> tuple[str, ...]:
    """Per layer, the part that mixes its positions."""
    num_layers = reader.integer("num_hidden_layers")
    kinds = reader.values.get("layer_types") or reader.values.get("layers_block_type") or [STATES[0]] * num_layers
    known = (*ATTENTION, *STATES)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise reader.refuse("layer_types", f"must be a list of {num_layers} names, each one of {', '.join(known)}")
    if not any(kind in ATTENTION for kind in kinds):
        raise reader.refuse("layer_types", f"must name {ATTENTION[0]} at least once")
    return tuple("attention" if kind in ATTENTION else "ssd" for kind in kinds)


def _ssd(reader: ConfigReader) -> SsdConfig:
    heads, expand = reader.integer("mamba_n_heads", 128), reader.integer("mamba_expand", 2)
    width = expand * reader.integer("hidden_size")
    if width % heads:
        raise reader.refuse("mamba_n_heads", f"must divide {width}, the size of the layer's inner inputs")
    size = width // heads
    if reader.values.get("mamba_d_head") not in ("auto", None) and reader.integer("mamba_d_head") != size:
        raise reader.refuse("mamba_d_head", f"must be {size}")
    groups = groups_of(reader, "mamba_n_groups", 1, "mamba_n_heads", heads)
    least, most = step_limits(reader)
    return SsdConfig(
        heads=heads,
        head_size=size,
        groups=groups,
        state_size=reader.integer("mamba_d_state", 256),
        taps=reader.integer("mamba_d_conv", 4, least=2),
        conv_bias=reader.flag("mamba_conv_bias", True),
        bias=reader.flag("mamba_proj_bias", False),
        least_step=least,
        most_step=most,
    )
