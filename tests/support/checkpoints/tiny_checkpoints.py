"""Tiny random checkpoints of two families, whose files tests change before they are written."""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

SIZES = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),  # with biases of query, key and value
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Store = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


@cache
def _built(family: str, tied: bool) -> Any:
    torch.manual_seed(5)
    config, model = FAMILIES[family]
    built = model(config(**SIZES, tie_word_embeddings=tied)).eval()
    for name, parameter in built.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return built


class Files:
    """The files of a checkpoint, and the model of `transformers` that they stand for."""

    def __init__(self, family: str, *, tied: bool = False) -> None:
        self.family = family
        self.model = copy.deepcopy(_built(family, tied))
        self.name = type(self.model).__name__
        self.config: dict[str, Any] = json.loads(self.model.config.to_json_string()) | {"architectures": [self.name]}
        self.tensors = {
            name: tensor.clone()
            for name, tensor in self.model.state_dict().items()
            if not name.endswith("inv_freq") and not (tied and name == "lm_head.weight")
        }
        self.homes: dict[str, str] = {}
        """The file of each tensor; model.safetensors for those that are not listed."""
        self.others: dict[str, Any] = {}
        """More files: bytes, or what is written as JSON."""

    def layers(self) -> dict[str, torch.nn.Linear]:
        return {name: part for name, part in self.model.named_modules() if isinstance(part, torch.nn.Linear)}

    def store(self, store: Store, *more: str) -> None:
        """Store the layers of attention and feed-forward in another format, and the layers of further names."""
        for name, layer in self.layers().items():
            if not name.endswith("_proj") and name not in more:
                continue
            stored, meant = store(name, layer.weight.detach().clone())
            self.tensors.pop(f"{name}.weight", None)
            if layer.bias is not None:
                stored.pop("bias", None)
            self.tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in stored.items()}
            layer.weight = torch.nn.Parameter(meant.clone())  # a new one, since the head may be the embedding

    def shard(self, *names: str) -> None:
        """Spread the tensors over files, neighbours over different ones."""
        self.homes = {name: names[index % len(names)] for index, name in enumerate(sorted(self.tensors))}

    def write(self, folder: Path) -> Path:
        by_file: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            by_file.setdefault(self.homes.get(name, SINGLE), {})[name] = tensor
        for file, tensors in by_file.items():
            save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))
        for file, content in self.others.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            (folder / file).write_bytes(data)
        return folder
