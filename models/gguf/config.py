"""A GGUF file's metadata as config.json has it.

Keys are those of ggml's gguf.md and of llama.cpp's converters. What changes the arithmetic and is not supported is
refused by its key.
"""

from array import array
from typing import Any

from troupellm.models.gguf.header import Header, StoredTensor
from troupellm.models.hf_config import ConfigReader
from troupellm.protocol.errors import ModelLoadError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
EMBEDDING, HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_NEEDLESS = frozenset({"vocab_size", "tensor_data_layout"})
_USUAL = {"attention.causal": True, "rope.scaling.attn_factor": 1.0}
"""What other keys may say: that nothing is different."""
_READ = frozenset(
    {
        "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
        "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip


def model_config(header: Header) -> dict[str, Any]:
    """What config.json would say.

    Raises:
        ModelLoadError: an architecture or a key that is not supported, or a value that is missing or wrong.
    """
    whole = ConfigReader(header.metadata, file=header.name)
    kind = whole.choice("general.architecture", tuple(ARCHITECTURES))
    prefix = f"{kind}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    for key, value in own.items():
        usual = (_USUAL[key],) if key in _USUAL else (0, False, "none")
        if key not in _READ | _NEEDLESS and value not in usual:
            raise ModelLoadError(f"{header.name}: {prefix}{key} is not supported")
    reader = ConfigReader({key: _single(value) for key, value in own.items()}, prefix, file=header.name)
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.name}: tensor {EMBEDDING} is missing, or no table")
    num_layers = reader.integer("block_count")
    if num_layers > len(header.tensors):
        raise reader.refuse("block_count", f"must be at most {len(header.tensors)}, the number of tensors")
    num_heads = reader.integer("attention.head_count")
    head_dim = reader.integer("attention.key_length", reader.integer("embedding_length") // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.integer(key, head_dim) != head_dim:
            raise reader.refuse(key, f"must be {head_dim}, the size of a head")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "hidden_size": reader.integer("embedding_length"),
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": reader.integer("context_length"),
        "rope_parameters": _rope(reader, header, head_dim),
        "tie_word_embeddings": HEAD not in header.tensors,
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
    }


def _rope(reader: ConfigReader, header: Header, head_dim: int) -> dict[str, Any]:
    """Rotation: the scaling that keys name, or factors for each frequency in a tensor (Llama 3.1's way)."""
    longest = reader.integer("context_length")
    rope: dict[str, Any] = {"rope_theta": reader.number("rope.freq_base", 10000.0)}
    kind = reader.choice("rope.scaling.type", ("none", "linear", "yarn"), "none")
    if kind == "none" and reader.number("rope.scale_linear", 1.0) != 1.0:
        return rope | {"rope_type": "linear", "factor": reader.number("rope.scale_linear")}
    if ROPE_FACTORS in header.tensors:
        factors = _numbers(header, header.tensors[ROPE_FACTORS])
        if kind != "none" or len(factors) != head_dim // 2 or not all(0 < factor < 1e6 for factor in factors):
            raise ModelLoadError(
                f"{header.name}: tensor {ROPE_FACTORS} must hold {head_dim // 2} factors, and be alone"
            )
        # Each frequency is divided by its factor, whatever the length.
        return rope | {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
            "original_max_position_embeddings": longest,
        }  # fmt: skip
    if kind == "none":
        return rope
    rope |= {"rope_type": kind, "factor": reader.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = reader.integer("rope.scaling.original_context_length", longest)
        rope["beta_fast"] = reader.number("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = reader.number("rope.scaling.yarn_beta_slow", 1.0)
    return rope


def _numbers(header: Header, tensor: StoredTensor) -> list[float]:
    if tensor.type != "F32":
        raise ModelLoadError(f"{header.name}: tensor {ROPE_FACTORS} has type {tensor.type}, expected F32")
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return array("f", file.read(tensor.nbytes)).tolist()


def _single(value: Any) -> Any:
    """A list with one number per layer as that number, where all are the same; otherwise it is refused as it is."""
    return value[0] if isinstance(value, array) and len(set(value)) == 1 else value
