"""Llama 4: experts whose inputs are weighed, beside a shared one. Tokens see those of their chunk in rotated layers,
and all in the others, whose queries grow with their positions.
"""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig, QueryGrowth
from troupellm.models.config.expert_config import expert_counts
from troupellm.models.config.hf_config import ConfigReader, decoder_config
from troupellm.models.families.smollm3 import rotated_layers

ARCHITECTURES = ("Llama4ForCausalLM",)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "interleave_moe_layer_step": 1,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""
NAMES = ExpertNames(blocks=("feed_forward",), router="router", transposed=True)
DENSE = ((".mlp.", ".feed_forward."),)
KINDS = ("full_attention", "chunked_attention")


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    if not reader.is_on("no_rope_layers"):
        reader = reader.without("no_rope_layers")
    turned, bias = rotated_layers(reader), reader.flag("attention_bias", False)
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias)
    growth = None
    if "attn_temperature_tuning" not in reader.values or reader.is_on("attn_temperature_tuning"):  # published: 4
        beta, original = reader.number("attn_scale"), reader.integer("floor_scale")
        growth = QueryGrowth(beta=beta, original=original, ahead=1, unrotated=True)
    return msgspec.structs.replace(
        plain,
        qk_norm="bare" if reader.flag("use_qk_norm", True) else "none",
        query_growth=growth,
        rope_interleaved=True,
        renamed=DENSE,
    ).with_layers(
        rope=tuple(plain.ropes[0] if turns else None for turns in turned),
        chunk=_chunks(reader, turned),
        intermediate_size=reader.integer("intermediate_size_mlp"),
        experts=_experts(reader),
    )


def _chunks(reader: ConfigReader, turned: tuple[bool, ...]) -> tuple[int | None, ...]:
    """`layer_types`, else the layers that are rotated have chunks."""
    chunk = reader.integer("attention_chunk_size") if reader.is_on("attention_chunk_size") else None
    kinds = reader.values.get("layer_types") or [KINDS[turns] for turns in turned]
    if not isinstance(kinds, list) or len(kinds) != len(turned) or any(kind not in KINDS for kind in kinds):
        raise reader.refuse("layer_types", f"must be a list of {len(turned)} times {' or '.join(KINDS)}")
    return tuple(chunk if kind == KINDS[1] else None for kind in kinds)


def _experts(reader: ConfigReader) -> tuple[MoeConfig | None, ...]:
    count, step = reader.integer("num_hidden_layers"), reader.integer("interleave_moe_layer_step")
    layers = reader.values.get("moe_layers")
    layers = list(range(step - 1, count, step)) if layers is None else layers
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < count for layer in layers):
        raise reader.refuse("moe_layers", f"must be a list of layers below {count}")
    num_experts, top_k = expert_counts(reader, 16, 1)
    size = reader.integer("intermediate_size")
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=size,
        scoring="sigmoid",
        weighs_inputs=True,
        shared_size=size,
        names=NAMES,
    )
    return tuple(moe if layer in layers else None for layer in range(count))
