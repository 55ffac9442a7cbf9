"""ERNIE 4.5: Llama that rotates adjacent pairs; with experts behind a softmax, and a bias that counts while experts are
chosen.
"""

from typing import Any

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig
from troupellm.models.config.hf_config import ConfigReader, architecture_of, decoder_config

ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM")
DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True}
SPARSE: dict[str, Any] = {
    "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
}  # fmt: skip
"""Values that the reference implementation assumes where config.json has none."""
NAMES = ExpertNames(shared="shared_experts", choice_bias="moe_statics.e_score_correction_bias", bias_in_row=True)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from the config.json of these families."""
    sparse = "Moe" in architecture_of(reader)
    reader = reader.with_defaults(**DEFAULTS, **({} if sparse else {"head_dim": 128}))
    if reader.number("compression_ratio", 1.0) != 1.0:
        raise reader.refuse("compression_ratio", "must be 1")
    bias = reader.flag("use_bias", False)
    if bias and sparse:
        raise reader.refuse("use_bias", "must be false in a model with experts")
    plain = decoder_config(reader, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    turned = msgspec.structs.replace(plain, rope_interleaved=True)
    return turned.with_layers(experts=_experts(reader)) if sparse else turned


def _experts(reader: ConfigReader) -> tuple[MoeConfig | None, ...]:
    reader = reader.with_defaults(**SPARSE)
    num_layers, experts, top_k = (reader.integer(key) for key in ("num_hidden_layers", "moe_num_experts", "moe_k"))
    if top_k > experts:
        raise reader.refuse("moe_k", f"must be at most moe_num_experts ({experts})")
    first, last = (reader.integer(f"moe_layer_{end}_index", least=-1) for end in ("start", "end"))
    last = num_layers - 1 if last == -1 else last
    interval, size = reader.integer("moe_layer_interval"), reader.integer("moe_intermediate_size")
    moe = MoeConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=size,
        renormalize=True,
        choice_bias=True,
        wide_router=True,
        shared_size=reader.integer("moe_num_shared_experts", least=0) * size,
        names=NAMES,
    )
    sparse = ((layer + 1) % interval == 0 and first <= layer <= last for layer in range(num_layers))
    return tuple(moe if has_experts else None for has_experts in sparse)
