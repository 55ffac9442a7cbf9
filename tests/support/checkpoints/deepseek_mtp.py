"""A tiny DeepSeek-V3 with random weights and a layer for further tokens."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

LAYERS, SIZE = 2, 64
SETTINGS: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": SIZE, "intermediate_size": 112, "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "kv_lora_rank": 32, "q_lora_rank": 40,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
    "num_mtp_layers": 0,
}  # fmt: skip


def write_deepseek(folder: Path) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """A checkpoint whose last layer is for further tokens, the model of `transformers` that has it, and the rest."""
    torch.manual_seed(5)
    config = transformers.DeepseekV3Config(**SETTINGS)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    reference.save_pretrained(folder)
    weights, at = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
    more = {name: torch.rand(SIZE) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    more["eh_proj.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.3
    copies = {
        f"{at}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{at}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    weights |= copies | {f"{at}{name}": tensor for name, tensor in more.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(said))
    return folder, reference, more
