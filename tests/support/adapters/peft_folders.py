"""Adapters in the form of PEFT's folders, with random numbers in both matrices."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from troupellm.models.adapters.sites import Part, Site, decoder_sites
from troupellm.models.config.decoder_config import DecoderConfig, LayerShape, RopeConfig

MODEL = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=40,
    hidden_size=16,
    layers=(LayerShape(num_heads=2, num_kv_heads=1, head_dim=8, rope=RopeConfig(), intermediate_size=24),) * 2,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    checkpoint_dtype="float32",
)
WEIGHTS = "adapter_model.safetensors"
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def modules(model: DecoderConfig, names: Collection[str]) -> dict[str, tuple[Site, Part]]:
    """The modules of a decoder with these last names, by their names in PEFT's files."""
    return {
        part.module if site.name == "head" else f"model.{part.module}": (site, part)
        for site in decoder_sites(model)
        for part in site.parts
        if part.module.rpartition(".")[2] in names
    }


def write_adapter(
    folder: Path,
    model: DecoderConfig,
    names: Collection[str] = ALL,
    *,
    rank: int = 4,
    seed: int = 0,
    body: str = "model.",
    changed: dict[str, Tensor | None] | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """Write an adapter of some modules, and return its tensors.

    Args:
        body: what names have in place of "model.".
        changed: tensors by name that are added, replaced, or left out.
        settings: of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    ranks = settings.get("rank_pattern", {})
    for module, (site, part) in modules(model, names).items():
        size = next((size for name, size in ranks.items() if module.endswith(name)), rank)
        key = f"base_model.model.{module.replace('model.', body, 1)}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(size, site.in_features, generator=generator) * 0.2
        tensors[f"{key}.lora_B.weight"] = torch.randn(part.width, size, generator=generator) * 0.2
        if settings.get("lora_bias"):
            tensors[f"{key}.lora_B.bias"] = torch.randn(part.width, generator=generator) * 0.2
    for name, tensor in (changed or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(names), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors
