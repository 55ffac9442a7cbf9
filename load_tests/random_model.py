"""A Llama with random weights and a tokenizer of made-up words, written as a Hugging Face folder for benchmarks."""

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np

INITIAL_DEVIATION = 0.02


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the model; heads have hidden_size / num_attention_heads numbers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 2048

    @property
    def num_parameters(self) -> int:
        kv = self.hidden_size * self.num_key_value_heads // self.num_attention_heads
        attention = 2 * self.hidden_size * (self.hidden_size + kv)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size + self.hidden_size


SHAPES = {
    "125m": Shape(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
    ),
    "tiny": Shape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    ),
}


def write_random_model(folder: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write config, float32 weights and tokenizer; the same seed writes the same model."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(shape, np.random.default_rng(seed)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    _write_tokenizer(folder, shape.vocab_size)
    return folder


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **msgspec.structs.asdict(shape),
        "head_dim": shape.hidden_size // shape.num_attention_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _weights(shape: Shape, random: "np.random.Generator") -> "dict[str, np.ndarray[Any, Any]]":
    import numpy as np

    def matrix(rows: int, columns: int) -> "np.ndarray[Any, Any]":
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(INITIAL_DEVIATION)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = hidden * shape.num_key_value_heads // shape.num_attention_heads
    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, hidden),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(shape.vocab_size, hidden),
    }
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones
        for name, (rows, columns) in sizes.items():
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
    return weights


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """256 byte tokens, then three-letter and four-letter words, so that any id reads as text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    for length in (3, 4):
        words += ["".join(letters) for letters in product(ascii_lowercase, repeat=length)][: vocab_size - len(words)]
    vocabulary = {word: number for number, word in enumerate(words[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
