"""EAGLE, EAGLE-3 and Medusa heads in plain torch, whole texts at once: what their papers and first code say."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

HEADS, KV_HEADS, EPS = 4, 2, 1e-5


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.rand(shape, generator=generator) + (0.5 if "norm" in name else -0.5)
        else:
            weights[name] = torch.randn(shape, generator=generator) * 2 * shape[1] ** -0.5
    return weights


def layer_shapes(prefix: str, size: int, wide: int, inputs: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * head_dim, inputs),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * head_dim, inputs),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * head_dim, inputs),
        f"{prefix}.self_attn.o_proj.weight": (size, HEADS * head_dim),
        f"{prefix}.mlp.gate_proj.weight": (wide, size),
        f"{prefix}.mlp.up_proj.weight": (wide, size),
        f"{prefix}.mlp.down_proj.weight": (size, wide),
        f"{prefix}.post_attention_layernorm.weight": (size,),
    }


def write_head(
    folder: Path, weights: dict[str, Tensor], config: dict[str, object], file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turned(x: Tensor) -> Tensor:
    """x: [positions, heads, head_dim], from position 0 on."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[0])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)


def attended(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    query, key, value = (
        F.linear(x, weights[f"{prefix}.self_attn.{name}_proj.weight"]).view(x.shape[0], count, -1)
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    query, key = turned(query), turned(key)
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    hidden = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    return F.linear(mixed.transpose(0, 1).flatten(1), weights[f"{prefix}.self_attn.o_proj.weight"])


def fed_forward(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def eagle(
    weights: dict[str, Tensor], embedding: Tensor, features: Tensor, tokens: Sequence[int], layers: int
) -> Tensor:
    """The next features [positions, size], of features [positions, size] and the tokens behind them."""
    x = F.linear(torch.cat((embedding[list(tokens)], features), -1), weights["fc.weight"], weights.get("fc.bias"))
    for layer in range(layers):
        prefix = f"layers.{layer}"
        x = x + attended(normed(x, weights[f"{prefix}.input_layernorm.weight"]) if layer else x, weights, prefix)
        x = x + fed_forward(normed(x, weights[f"{prefix}.post_attention_layernorm.weight"]), weights, prefix)
    return x


def eagle3(weights: dict[str, Tensor], embedding: Tensor, vectors: Tensor, tokens: Sequence[int]) -> Tensor:
    """The next vectors [positions, size], before the norm."""
    at = "midlayer"
    embedded = normed(embedding[list(tokens)], weights[f"{at}.input_layernorm.weight"])
    hidden = normed(vectors, weights[f"{at}.hidden_norm.weight"])
    x = vectors + attended(torch.cat((embedded, hidden), -1), weights, at)
    return x + fed_forward(normed(x, weights[f"{at}.post_attention_layernorm.weight"]), weights, at)


def medusa(weights: dict[str, Tensor], head: int, blocks: int, feature: Tensor) -> Tensor:
    """What goes into the head's output matrix."""
    for block in range(blocks):
        name = f"{head}.{block}.linear"
        feature = feature + F.silu(F.linear(feature, weights[f"{name}.weight"], weights[f"{name}.bias"]))
    return feature
