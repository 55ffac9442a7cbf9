"""A two-layer Llama with random weights and a byte-level tokenizer, in Hugging Face's format.

The logits are wider than the vocabulary, as padded checkpoints have it.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL_TOKENS)
LOGITS_WIDTH = 272
CONTEXT = 4096
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 32, 2, 4, 2, 64

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint; the same seed writes the same model."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(np.random.default_rng(seed)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config()))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    tokenizer_config = {
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": LOGITS_WIDTH,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 256,
    }


def _weights(random: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0.0, 2.0 * columns**-0.5, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    head_size = HIDDEN // HEADS
    weights = {
        "model.embed_tokens.weight": matrix(LOGITS_WIDTH, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(LOGITS_WIDTH, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * head_size, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * head_size, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * head_size, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_size),
            f"{prefix}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return weights


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer
