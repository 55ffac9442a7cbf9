"""A Llama or Qwen3 with random weights and a tokenizer of made-up words, a Hugging Face folder for benchmarks."""

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np

INITIAL_DEVIATION = 0.02


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the model; without `head_dim`, heads have hidden_size / num_attention_heads numbers."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 2048
    head_dim: int | None = None
    family: Literal["llama", "qwen3"] = "llama"
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_parameters(self) -> int:
        queries, keys = self.num_attention_heads * self.head_size, self.num_key_value_heads * self.head_size
        attention = 2 * self.hidden_size * (queries + keys) + (2 * self.head_size if self.family == "qwen3" else 0)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_hidden_layers * layer + embeddings + self.hidden_size


SHAPES = {
    "125m": Shape(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=32000,
    ),
    "24m": Shape(
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        vocab_size=32000,
    ),
    "qwen3-0.6b": Shape(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=151936,
        head_dim=128,
        family="qwen3",
        tie_word_embeddings=True,
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
    write_tokenizer(folder, shape.vocab_size)
    return folder


def write_model_of_texts(folder: Path, shape: Shape) -> Path:
    """The same with the built-in model's tokenizer and template, for requests of plain text."""
    from troupellm.models.hub.source import BUILTIN_FOLDER

    write_random_model(folder, shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUILTIN_FOLDER / name).read_bytes())
    return folder


def _config(shape: Shape) -> dict[str, Any]:
    sizes = {name: value for name, value in msgspec.structs.asdict(shape).items() if name != "family"}
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.family == "qwen3" else "LlamaForCausalLM"],
        "model_type": shape.family,
        **sizes,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
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
    queries, kv = shape.num_attention_heads * shape.head_size, shape.num_key_value_heads * shape.head_size
    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab_size, hidden),
        "model.norm.weight": ones,
    }
    if not shape.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(shape.vocab_size, hidden)
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones
        if shape.family == "qwen3":
            weights[f"{prefix}.self_attn.q_norm.weight"] = np.ones(shape.head_size, np.float32)
            weights[f"{prefix}.self_attn.k_norm.weight"] = np.ones(shape.head_size, np.float32)
        for name, (rows, columns) in sizes.items():
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
    return weights


def write_tokenizer(folder: Path, vocab_size: int) -> None:
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
