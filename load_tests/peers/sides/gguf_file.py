"""A random benchmark model as a GGUF file, written with the `gguf` package. Runs in llama.cpp's environment, too.

The package quantizes to a few types only. Blocks of the others hold random codes, with scales that make weights about
as large as the model's: what they mean does not matter to speed. Mixtures have llama.cpp's types, and where rows are no
multiple of 256, types of blocks of 32 take the place of others, as there.
"""

import json
from pathlib import Path
from typing import Any

from troupellm.load_tests.random_model import INITIAL_DEVIATION

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
TYPES = {
    "fp32": "F32", "int8": "Q8_0", "q4_0": "Q4_0", "q8_0": "Q8_0", "q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K",
    "iq4_xs": "IQ4_XS",
}  # fmt: skip
"""The type of most matrices, by the name of a file's type or of a precision."""
FINER = ("q4_k_m", "q5_k_m")
"""Mixtures whose head, and values and `ffn_down` in half of the layers, are in Q6_K."""
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_K": ((0, 1 / 170), (2, 1 / 22.7)), "Q5_K": ((0, 1 / 340), (2, 1 / 22.0)), "Q6_K": ((208, 1 / 1360),),
    "IQ4_XS": ((0, 1 / 1400),), "IQ4_NL": ((0, 1 / 76),),
}  # fmt: skip
"""Types with random codes: where a block has float16 numbers, and these in parts of the weights' deviation."""


def write_gguf(source: str, target: str, kind: str) -> None:
    """Every matrix in the type of `kind`, one of `TYPES`; vectors stay float32."""
    import gguf
    import numpy as np
    from safetensors import safe_open

    folder = Path(source)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer, random = gguf.GGUFWriter(target, config["model_type"]), np.random.default_rng(0)
    _describe(writer, config, gguf.LlamaFileType.ALL_F32 if kind == "fp32" else gguf.LlamaFileType.GUESSED)
    _add_vocabulary(writer, folder, config["vocab_size"])
    with safe_open(folder / "model.safetensors", "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 (it is no mapping)
            tensor = weights.get_tensor(name)
            if config["model_type"] == "llama" and ".q_proj." in name:
                tensor = _interleaved(tensor, config["num_attention_heads"])
            elif config["model_type"] == "llama" and ".k_proj." in name:
                tensor = _interleaved(tensor, config["num_key_value_heads"])
            layout = _layout(name, tensor.shape[-1], kind, config["num_hidden_layers"])
            if tensor.ndim < 2 or layout == "F32":
                writer.add_tensor(_gguf_name(name), tensor)
                continue
            stored = gguf.GGMLQuantizationType[layout]
            if layout in SCALES:
                data = _random_blocks(tensor.shape, gguf.GGML_QUANT_SIZES[stored], SCALES[layout], random)
            else:
                data = gguf.quants.quantize(tensor, stored)
            writer.add_tensor(_gguf_name(name), data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _layout(name: str, width: int, kind: str, layers: int) -> str:
    """The type of a matrix."""
    layer = name.split(".")[2] if ".layers." in name else ""
    finer = kind in FINER and (
        name.startswith("lm_head") or (layer and int(layer) % 2 == 0 and (".v_proj." in name or ".down_proj." in name))
    )
    found = "Q6_K" if finer else TYPES[kind]
    return FALLBACKS.get(found, found) if width % 256 else found


def _random_blocks(
    shape: tuple[int, ...], sizes: tuple[int, int], scales: tuple[tuple[int, float], ...], random: Any
) -> Any:
    """Bytes [rows, bytes of a row]."""
    import numpy as np

    weights, size = sizes
    data = random.integers(0, 256, (shape[0] * shape[1] // weights, size), dtype=np.uint8)
    for at, part in scales:
        data[:, at : at + 2] = np.array([INITIAL_DEVIATION * part], np.float16).view(np.uint8)
    return data.reshape(shape[0], -1)


def _describe(writer: Any, config: dict[str, Any], file_type: int) -> None:
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
    writer.add_file_type(file_type)


def _add_vocabulary(writer: Any, folder: Path, size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    words[-1] = "ab"  # the format insists on a merge, whose result is a token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])
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
