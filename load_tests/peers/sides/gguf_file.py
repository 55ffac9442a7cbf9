"""A random benchmark model as a GGUF file, written with the `gguf` package. Runs in llama.cpp's environment."""

import json
from pathlib import Path
from typing import Any

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(source: str, target: str, *, quantized: bool) -> None:
    """Every matrix in float32, or in Q8_0; vectors stay float32."""
    import gguf
    from safetensors import safe_open

    folder = Path(source)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, config["model_type"])
    _describe(writer, config, gguf, quantized)
    _add_vocabulary(writer, folder, config["vocab_size"])
    with safe_open(folder / "model.safetensors", "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 (it is no mapping)
            tensor = weights.get_tensor(name)
            if config["model_type"] == "llama" and ".q_proj." in name:
                tensor = _interleaved(tensor, config["num_attention_heads"])
            elif config["model_type"] == "llama" and ".k_proj." in name:
                tensor = _interleaved(tensor, config["num_key_value_heads"])
            if quantized and tensor.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(_gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(_gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: dict[str, Any], gguf: Any, quantized: bool) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.ALL_F32)


def _add_vocabulary(writer: Any, folder: Path, size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])  # it insists on one
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def _interleaved(tensor: Any, heads: int) -> Any:
    """GGUF's `llama` rotates neighbours, where the checkpoint's halves rotate with each other."""
    rows, columns = tensor.shape
    return tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
