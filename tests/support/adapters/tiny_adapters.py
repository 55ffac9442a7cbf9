"""Adapters of the tiny model with random numbers, in the form of PEFT's folders; written without torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from troupellm.tests.support.checkpoints.tiny_model import HEADS, HIDDEN, KV_HEADS, LAYERS

_WIDTHS = {"q_proj": HIDDEN, "v_proj": HIDDEN // HEADS * KV_HEADS}


def write_tiny_adapter(folder: Path, seed: int, *, rank: int = 4, hidden: int = HIDDEN, **settings: Any) -> Path:
    """The same seed writes the same adapter.

    Args:
        hidden: width of the base model that it is for.
        settings: of adapter_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for name, width in _WIDTHS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = random.standard_normal((rank, hidden)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = random.standard_normal((width, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(_WIDTHS), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
