"""Tiny models as GGUF files, written by the format's own package, and what their tokens must be."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

from troupellm.tests.support.gguf.gguf_blocks import random_blocks

Kind = gguf.GGMLQuantizationType
CONTROL, NORMAL = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog; it's 1234 o'clock, isn't it?\nDeja vu, encore une fois."
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.08, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def byte_level(special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """Trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str) -> int:
    """Returns the number of tokens."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokens.index(SPECIAL[2]))
    writer.add_pad_token_id(tokens.index(SPECIAL[0]))
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def turned(rows: int, heads: int) -> list[int]:
    """Where llama.cpp's converter takes each row of queries and keys from: halves of a head become neighbours."""
    size = rows // heads
    order = []
    for head in range(heads):
        for pair in range(size // 2):
            order += [head * size + pair, head * size + size // 2 + pair]
    return order


def packed(weight: NDArray[np.float32], kind: Kind, seed: int) -> NDArray[Any]:
    """A weight in such blocks; random ones of the same shape where the package packs none (K- and I-quants)."""
    try:
        return gguf.quants.quantize(np.ascontiguousarray(weight), kind)
    except NotImplementedError:
        return random_blocks(weight.shape, kind.name, seed=seed)


class Written:
    """A model in a file, and the same model in transformers."""

    def __init__(
        self,
        path: Path,
        config: transformers.PretrainedConfig,
        kinds: dict[str, Kind],
        *,
        pre: str = "gpt-2",
        extra: dict[str, Any] | None = None,
        rope_factors: Tensor | None = None,
    ) -> None:
        """kinds: of a tensor whose name contains the key, the last one that does."""
        self.path, self._kinds = path, kinds
        self.architecture = config.model_type
        writer = gguf.GGUFWriter(str(path), self.architecture)
        self.tokenizer = byte_level()
        config.vocab_size = add_byte_level(writer, self.tokenizer, pre)
        torch.manual_seed(4)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in self.model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        self._add_config(writer, config, extra or {})
        tied = config.tie_word_embeddings
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if not (tied and name == "lm_head.weight"):
                    parameter.copy_(self._add(writer, name, parameter))
        if rope_factors is not None:
            writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add_config(self, writer: gguf.GGUFWriter, config: Any, extra: dict[str, Any]) -> None:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(10000.0)
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        for key, value in extra.items():
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
            add[type(value)](key, value)

    def _add(self, writer: gguf.GGUFWriter, name: str, parameter: Tensor) -> Tensor:
        """Write one tensor; returns what it means."""
        there, weight = self._name(name), parameter.detach().numpy()
        order = None
        if self.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            order = turned(weight.shape[0], weight.shape[0] // self.head_dim)
            weight = weight[order]
        kind = next((kind for part, kind in reversed(self._kinds.items()) if part in there), Kind.F32)
        if weight.ndim == 1:
            kind = Kind.F32
        data = packed(weight, kind, seed=len(writer.tensors[0]))
        writer.add_tensor(there, data, raw_dtype=kind)
        meant = gguf.quants.dequantize(data, kind).reshape(weight.shape)
        if order is not None:
            back = np.empty_like(meant)
            back[order] = meant
            meant = back
        return torch.from_numpy(meant.copy())

    def _name(self, name: str) -> str:
        layer, last = "", name.rpartition(".")[2]
        stem = name.removesuffix(f".{last}")
        if stem.startswith("model.layers."):
            number, _, stem = stem.removeprefix("model.layers.").partition(".")
            layer = f"blk.{number}."
        return f"{layer}{NAMES[stem]}.{last}"
