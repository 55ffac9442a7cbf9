"""A GGUF file as a checkpoint of 32-bit floats whose inner dimensions stand in another order.

Public GGUF files lie on grids of 32 weights. A quantizer that groups by 32 finds the same grids again, and its loss
looks smaller than it is. An order of the inner dimensions does not change what the model computes, and breaks the
grids.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""Their dimension is a query's and a key's, which stays."""


def write_reordered(file: Path, folder: Path, seed: int = 0) -> Path:
    """
    Args:
        file: GGUF, of a family that transformers reads (Llama, Qwen, Gemma) with gate and up projections apart.
        folder: for config, weights and tokenizer.

    Raises:
        OSError, ValueError: transformers cannot read it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = reordered(model.state_dict(), config.hidden_size, config.intermediate_size, head_size, seed)
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    description = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(description), encoding="utf-8")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def reordered(
    weights: dict[str, Tensor], hidden: int, intermediate: int, head_size: int, seed: int
) -> dict[str, Tensor]:
    """The same function with the residual stream, the inner dimension of each MLP and that of the values permuted.

    Args:
        weights: of a decoder, by Hugging Face's names; linears are [out, in].
    """
    random = torch.Generator().manual_seed(seed)
    stream = torch.randperm(hidden, generator=random)
    inner = torch.randperm(intermediate, generator=random)
    head = torch.randperm(head_size, generator=random)

    def of_heads(rows: int) -> Tensor:
        """The order of so many rows, in which each head's stand together."""
        return (torch.arange(rows // head_size)[:, None] * head_size + head).flatten()

    def new(name: str, weight: Tensor) -> Tensor:
        match name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]:
            case "q_proj" | "k_proj" if weight.ndim == 2:
                return weight[:, stream]
            case "v_proj":
                weight = weight[of_heads(len(weight))]
                return weight[:, stream] if weight.ndim == 2 else weight
            case "o_proj" if weight.ndim == 2:
                return weight[stream][:, of_heads(weight.shape[1])]
            case "gate_proj" | "up_proj":
                return weight[inner][:, stream]
            case "down_proj":
                return weight[stream][:, inner]
            case "embed_tokens" | "lm_head":
                return weight[:, stream]
        if name.endswith(HEAD_NORMS) or weight.ndim != 1 or len(weight) != hidden:
            return weight
        return weight[stream]

    return {name: new(name, weight).contiguous() for name, weight in weights.items()}
