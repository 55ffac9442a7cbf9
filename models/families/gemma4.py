"""Gemma 4: Gemma 3 whose layers differ. Layers without a window have wider heads, of which a quarter of the angles
turns, and may take their values from the projection of their keys; the last layers may read the keys and values of
earlier ones and have a wider feed-forward part. Layers may have inputs of their own, and experts beside that part.
"""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, LayerInputs, MoeConfig, RopeConfig
from troupellm.models.config.hf_config import ACTIVATIONS, ConfigReader, decoder_config, scaled_rope
from troupellm.models.families import gemma2

ARCHITECTURES = ("Gemma4ForCausalLM",)
BARE = ("Gemma4TextModel",)
CLASSIFIERS = ("Gemma4TextForSequenceClassification",)
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "sliding_window": 512,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0,
    "global_head_dim": 512,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""The rotations of files that describe none."""
PROPORTIONAL = ("rope_type", "rope_theta", "partial_rotary_factor", "factor")
"""Keys of that rotation; others may change it."""


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(**DEFAULTS)
    if reader.values.get("use_bidirectional_attention") not in (None, "vision"):
        raise reader.refuse("use_bidirectional_attention", "must be null or vision")
    bias = reader.flag("attention_bias", False)
    windows = (*gemma2.windows_but_every(reader, 6)[:-1], None)  # the last layer has none in any case
    sliding, full = _ropes(reader)
    plain = decoder_config(
        reader,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        windows=windows,
        activation=ACTIVATIONS[reader.choice("hidden_activation", tuple(ACTIVATIONS))],
        rope=sliding,
    )
    inputs = None
    if reader.integer("hidden_size_per_layer_input", 0, least=0):
        inputs = LayerInputs(
            vocab_size=reader.integer("vocab_size_per_layer_input"), size=reader.integer("hidden_size_per_layer_input")
        )
    model = msgspec.structs.replace(
        plain,
        norms=gemma2.NORMS,
        value_norm=True,
        embedding_scale=plain.hidden_size**0.5,
        attention_scale=1.0,
        logit_softcap=reader.optional("final_logit_softcapping") or 0.0,
        layer_scalar=True,
        layer_inputs=inputs,
    )
    wide, same = [window is None for window in windows], reader.flag("attention_k_eq_v", False)
    heads = [_heads(reader, layer, wide=is_wide) for layer, is_wide in enumerate(wide)]
    sources = _sources(reader, windows)
    width, twice = reader.integer("intermediate_size"), 1 + reader.flag("use_double_wide_mlp", False)
    return model.with_layers(
        rope=tuple(full if is_wide else sliding for is_wide in wide),
        head_dim=tuple(head_dim for head_dim, _ in heads),
        num_kv_heads=tuple(kv_heads for _, kv_heads in heads),
        keys_as_values=tuple(same and is_wide for is_wide in wide),
        kv_from=sources,
        intermediate_size=tuple(width if source is None else width * twice for source in sources),
        experts=_experts(reader),
    )


def _ropes(reader: ConfigReader) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers with a window and of those that see everything."""
    both = reader.with_defaults(rope_parameters=ROPES).section("rope_parameters")
    sliding, full = both.section(SLIDING), both.section(FULL)
    for section, key in ((sliding, SLIDING), (full, FULL)):
        if not section.values:
            raise both.refuse(key, "must describe a rotation")
    near = scaled_rope(reader, sliding, sliding.number("rope_theta"), reader.integer("head_dim"))
    if full.values.get("rope_type") != "proportional":
        return near, scaled_rope(reader, full, full.number("rope_theta"), reader.integer("global_head_dim"))
    unknown = next((key for key in full.values if key not in PROPORTIONAL and full.is_on(key)), None)
    if unknown is not None:
        raise full.refuse(unknown, "is not supported")
    if (turning := full.number("partial_rotary_factor", 1.0)) > 1:
        raise full.refuse("partial_rotary_factor", "must be at most 1")
    theta, factor = full.number("rope_theta"), full.number("factor", 1.0)
    return near, RopeConfig(kind="proportional", theta=theta, factor=factor, turning=turning)


def _heads(reader: ConfigReader, layer: int, *, wide: bool) -> tuple[int, int]:
    """Size and number of a layer's key heads: `per_layer_config` of newer files, else by the kind of the layer."""
    head_dim, kv_heads = reader.integer("head_dim"), reader.integer("num_key_value_heads")
    listed = reader.section("per_layer_config")
    if listed.values:
        own = listed.section(str(layer))
        unknown = next((key for key in own.values if key not in ("head_dim", "num_key_value_heads")), None)
        if unknown is not None:
            raise own.refuse(unknown, "is not supported")
        head_dim, kv_heads = own.integer("head_dim", head_dim), own.integer("num_key_value_heads", kv_heads)
    elif wide:
        head_dim = reader.integer("global_head_dim")
        if reader.flag("attention_k_eq_v", False):
            kv_heads = reader.integer("num_global_key_value_heads", kv_heads)
    if head_dim % 2:
        raise reader.refuse("head_dim", f"must be even, {head_dim} of layer {layer} is not")
    if reader.integer("num_attention_heads") % kv_heads:
        raise reader.refuse("num_attention_heads", f"must be a multiple of {kv_heads}, the key heads of layer {layer}")
    return head_dim, kv_heads


def _sources(reader: ConfigReader, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Per layer, whose keys and values it reads: the last `num_kv_shared_layers` those of the last layer of their kind
    that has some of its own."""
    shared = reader.integer("num_kv_shared_layers", 0, least=0)
    own = len(windows) - shared
    last = {window: layer for layer, window in enumerate(windows[:own])}
    if own < 1 or not set(windows[own:]) <= set(last):
        raise reader.refuse("num_kv_shared_layers", "must leave a layer of every kind with keys and values of its own")
    return (*(None for _ in range(own)), *(last[window] for window in windows[own:]))


def _experts(reader: ConfigReader) -> MoeConfig | None:
    if not reader.flag("enable_moe_block", False):
        return None
    num_experts, top_k = reader.integer("num_experts"), reader.integer("top_k_experts")
    if top_k > num_experts:
        raise reader.refuse("top_k_experts", f"must be at most num_experts ({num_experts})")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("moe_intermediate_size"),
        renormalize=True,
        activation=ACTIVATIONS[reader.choice("hidden_activation", tuple(ACTIVATIONS))],
        beside_dense=True,
    )
