"""Settings from the files of models without experts, in the form of config.json.

Keys and what they leave out are those of llama.cpp's converters (`conversion/`) and model files (`src/models/`).
"""

from typing import Any

from troupellm.models.config.gguf_metadata import EMBEDDING, HEAD, Metadata
from troupellm.models.config.gguf_rope import rope_parameters, stretched_rope
from troupellm.protocol.errors import ModelLoadError

Config = dict[str, Any]
RMS_NORM = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
"""config.json's key and the file's."""
LAYER_NORM = ("layer_norm_eps", "attention.layer_norm_epsilon")
"""config.json's key and the file's of norms that take off the mean."""


def common(file: Metadata, architecture: str, model_type: str) -> Config:
    """All of a decoder but its heads and their rotation.

    Raises:
        ModelLoadError: a value is missing or wrong.
    """
    reader, header = file.reader, file.header
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.name}: tensor {EMBEDDING} is missing, or no table")
    num_blocks, drafting = reader.integer("block_count"), reader.integer("nextn_predict_layers", 0, least=0)
    if num_blocks > len(header.tensors):
        raise reader.refuse("block_count", f"must be at most {len(header.tensors)}, the number of tensors")
    for name, key in ((EMBEDDING, "embedding_length"), ("blk.0.ffn_down.weight", "feed_forward_length")):
        table = header.tensors.get(name)
        if table is not None and table.shape[-1] != reader.integer(key):
            raise reader.refuse(key, f"must be {table.shape[-1]}, the columns of {name}")
    if drafting >= num_blocks:
        raise reader.refuse("nextn_predict_layers", f"must be below block_count ({num_blocks})")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": reader.integer("embedding_length"),
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": num_blocks - drafting,
        "max_position_embeddings": reader.integer("context_length"),
        "tie_word_embeddings": HEAD not in header.tensors,
    }


def decoder(
    file: Metadata,
    architecture: str,
    model_type: str,
    *,
    partial: bool = False,
    norm: tuple[str, str] = RMS_NORM,
    num_kv_heads: int | None = None,
) -> Config:
    """A decoder whose heads are rotated.

    Args:
        partial: whether its family can rotate a part of each head.
        norm: config.json's key and the file's for the epsilon of its norms.
        num_kv_heads: where the file has one number per layer.

    Raises:
        ModelLoadError: a value is missing or wrong.
    """
    reader, found = file.reader, common(file, architecture, model_type)
    num_heads = reader.integer("attention.head_count")
    size = reader.integer("attention.key_length", found["hidden_size"] // num_heads)
    rotary = reader.integer("rope.dimension_count", size)
    if reader.integer("attention.value_length", size) != size:
        raise reader.refuse("attention.value_length", f"must be {size}, the size of a key")
    if rotary != size and not (partial and rotary < size):
        raise reader.refuse("rope.dimension_count", f"must be {size}, the size of a head")
    rope = stretched_rope(file, rotary) if model_type == "phi3" else rope_parameters(file, rotary)
    if rotary < size:
        rope["partial_rotary_factor"] = (rotary + 0.5) / size  # which is multiplied by the size and rounded down
    return found | {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or reader.integer("attention.head_count_kv", num_heads),
        "head_dim": size,
        "rope_parameters": rope,
        "attention_bias": file.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": file.has_tensor("blk.0.ffn_up.bias"),
        norm[0]: reader.number(norm[1]),
    }


def layer_kinds(file: Metadata, num_layers: int, period: int) -> Config:
    """The window and the layers that have it: those that a key names, else all but each `period`-th."""
    window = file.reader.integer("attention.sliding_window", 0, least=0)
    flags = file.flags("attention.sliding_window_pattern", num_layers)
    flags = flags or [(layer + 1) % period != 0 for layer in range(num_layers)]
    kinds = ["sliding_attention" if flag and window else "full_attention" for flag in flags]
    return {"sliding_window": window or None, "layer_types": kinds}


def llama(file: Metadata) -> Config:
    """Llama; with a window Mistral, with experts Mixtral."""
    reader = file.reader
    window = reader.integer("attention.sliding_window", 0, least=0) or None
    if reader.integer("expert_count", 0, least=0):
        experts = {
            "num_local_experts": reader.integer("expert_count"),
            "num_experts_per_tok": reader.integer("expert_used_count"),
        }
        return decoder(file, "MixtralForCausalLM", "mixtral") | experts | {"sliding_window": window}
    if window:
        return decoder(file, "MistralForCausalLM", "mistral") | {"sliding_window": window}
    return decoder(file, "LlamaForCausalLM", "llama")


def qwen2(file: Metadata) -> Config:
    return decoder(file, "Qwen2ForCausalLM", "qwen2")


def qwen3(file: Metadata) -> Config:
    return decoder(file, "Qwen3ForCausalLM", "qwen3")


def gemma2(file: Metadata) -> Config:
    found = decoder(file, "Gemma2ForCausalLM", "gemma2")
    caps = {
        "attn_logit_softcapping": file.reader.optional("attn_logit_softcapping"),
        "final_logit_softcapping": file.reader.optional("final_logit_softcapping"),
    }
    return found | caps | _gemma(file, found, period=2, wide=46)


def gemma3(file: Metadata) -> Config:
    """Layers with a window have a rotation of their own, which nothing stretches."""
    found = decoder(file, "Gemma3ForCausalLM", "gemma3_text")
    local = {"rope_type": "default", "rope_theta": file.reader.number("rope.freq_base_swa", 10000.0)}
    rope = {"full_attention": found["rope_parameters"], "sliding_attention": local}
    cap = {"final_logit_softcapping": file.reader.optional("final_logit_softcapping")}
    return found | cap | _gemma(file, found, period=6, wide=62) | {"rope_parameters": rope}


def _gemma(file: Metadata, found: Config, *, period: int, wide: int) -> Config:
    """wide: layers of the one size whose scores are scaled by another number than the size of a head."""
    layers = found["num_hidden_layers"]
    scale = found["hidden_size"] // found["num_attention_heads"] if layers == wide else found["head_dim"]
    return layer_kinds(file, layers, period) | {"query_pre_attn_scalar": scale}


def phi3(file: Metadata) -> Config:
    window = file.reader.integer("attention.sliding_window", 0, least=0) or None
    found = decoder(file, "Phi3ForCausalLM", "phi3", partial=True)
    original = found["rope_parameters"].get("original_max_position_embeddings", found["max_position_embeddings"])
    return found | {"sliding_window": window, "original_max_position_embeddings": original}


def granite(file: Metadata) -> Config:
    """Raises ModelLoadError where `rope.scaling.finetuned` says that nothing is rotated."""
    reader = file.reader
    if not reader.flag("rope.scaling.finetuned", True):
        raise reader.refuse("rope.scaling.finetuned", "must be true: without rotation the model is not supported")
    return decoder(file, "GraniteForCausalLM", "granite") | {
        "attention_multiplier": reader.number("attention.scale"),
        "embedding_multiplier": reader.number("embedding_scale"),
        "residual_multiplier": reader.number("residual_scale"),
        "logits_scaling": reader.number("logit_scale"),
    }


def smollm3(file: Metadata) -> Config:
    """No key says that each fourth layer has no rotation."""
    return decoder(file, "SmolLM3ForCausalLM", "smollm3") | {"no_rope_layer_interval": 4}


def olmo2(file: Metadata) -> Config:
    """OLMo 2; with windows OLMo 3, whose layers with a window have an unstretched rotation."""
    found = decoder(file, "Olmo2ForCausalLM", "olmo2")
    kinds = layer_kinds(file, found["num_hidden_layers"], 4)
    if kinds["sliding_window"] is None:
        return found
    full = found["rope_parameters"]
    base = file.reader.number("rope.freq_base_swa", full["rope_theta"])
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": base}}
    named = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return found | kinds | named | {"rope_parameters": rope}


def glm4(file: Metadata) -> Config:
    found = decoder(file, "Glm4ForCausalLM", "glm4", partial=True)
    return found | {"rope_parameters": {"partial_rotary_factor": 1.0, **found["rope_parameters"]}}


def gemma(file: Metadata) -> Config:
    return decoder(file, "GemmaForCausalLM", "gemma")


def exaone4(file: Metadata) -> Config:
    """If some layers have a window, the others are not rotated."""
    found = decoder(file, "Exaone4ForCausalLM", "exaone4")
    return found | layer_kinds(file, found["num_hidden_layers"], 4)


def ernie4_5(file: Metadata) -> Config:
    return decoder(file, "Ernie4_5ForCausalLM", "ernie4_5") | {"use_bias": file.has_tensor("blk.0.attn_q.bias")}


def seed_oss(file: Metadata) -> Config:
    found = decoder(file, "SeedOssForCausalLM", "seed_oss")
    return found | {"attention_out_bias": file.has_tensor("blk.0.attn_output.bias")}


def cohere2(file: Metadata) -> Config:
    """Layers without a window are not rotated either."""
    found = decoder(file, "Cohere2ForCausalLM", "cohere2", norm=LAYER_NORM)
    scale = {"logit_scale": file.reader.number("logit_scale")}
    return found | layer_kinds(file, found["num_hidden_layers"], 4) | scale


def lfm2(file: Metadata) -> Config:
    """Layers without heads of keys have a convolution instead."""
    key, reader = "attention.head_count_kv", file.reader
    counts = file.counts(key, reader.integer("block_count"))
    heads = {count for count in counts if count}
    if len(heads) != 1:
        raise reader.refuse(key, "must hold one number beside 0")
    found = decoder(file, "Lfm2ForCausalLM", "lfm2", num_kv_heads=heads.pop())
    return found | {
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "conv_L_cache": reader.integer("shortconv.l_cache"),
        "norm_eps": found[RMS_NORM[0]],
        "block_auto_adjust_ff_dim": False,
    }
