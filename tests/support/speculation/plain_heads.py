"""EAGLE, EAGLE-3 and Medusa heads in plain torch, whole texts at once: what their papers and first code say."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from troupellm.tests.support.checkpoints.tiny_model import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LOGITS_WIDTH,
    write_tiny_model,
)

EPS = 1e-5
SIZE, WIDE, HEAD_DIM, DRAFT_VOCABULARY = HIDDEN, INTERMEDIATE, HIDDEN // HEADS, 100
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": SIZE, "intermediate_size": WIDE, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": LOGITS_WIDTH, "rms_norm_eps": EPS, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
CONFIG3 = CONFIG | {"draft_vocab_size": DRAFT_VOCABULARY, "eagle_aux_hidden_state_layer_ids": [1, 2, 2]}


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


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """x: [positions, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)


def attended(x: Tensor, weights: dict[str, Tensor], prefix: str, positions: Tensor | None) -> Tensor:
    query, key, value = (
        F.linear(x, weights[f"{prefix}.self_attn.{name}_proj.weight"]).view(x.shape[0], count, -1)
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    positions = torch.arange(x.shape[0]) if positions is None else positions
    query, key = turned(query, positions), turned(key, positions)
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    hidden = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value
    return F.linear(mixed.transpose(0, 1).flatten(1), weights[f"{prefix}.self_attn.o_proj.weight"])


def fed_forward(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def eagle(
    weights: dict[str, Tensor],
    embedding: Tensor,
    features: Tensor,
    tokens: Sequence[int],
    layers: int,
    positions: Tensor | None = None,
) -> Tensor:
    """The next features [positions, size], of features [positions, size] and the tokens behind them; positions: where
    these stand in the text, if not from its beginning on."""
    x = F.linear(torch.cat((embedding[list(tokens)], features), -1), weights["fc.weight"], weights.get("fc.bias"))
    for layer in range(layers):
        prefix = f"layers.{layer}"
        entering = normed(x, weights[f"{prefix}.input_layernorm.weight"]) if layer else x
        x = x + attended(entering, weights, prefix, positions)
        x = x + fed_forward(normed(x, weights[f"{prefix}.post_attention_layernorm.weight"]), weights, prefix)
    return x


def eagle3(
    weights: dict[str, Tensor],
    embedding: Tensor,
    vectors: Tensor,
    tokens: Sequence[int],
    positions: Tensor | None = None,
) -> Tensor:
    """The next vectors [positions, size], before the norm; positions: as of `eagle`."""
    at = "midlayer"
    embedded = normed(embedding[list(tokens)], weights[f"{at}.input_layernorm.weight"])
    hidden = normed(vectors, weights[f"{at}.hidden_norm.weight"])
    x = vectors + attended(torch.cat((embedded, hidden), -1), weights, at, positions)
    return x + fed_forward(normed(x, weights[f"{at}.post_attention_layernorm.weight"]), weights, at)


def medusa(weights: dict[str, Tensor], head: int, blocks: int, feature: Tensor) -> Tensor:
    """The input of the head's output matrix."""
    for block in range(blocks):
        name = f"{head}.{block}.linear"
        feature = feature + F.silu(F.linear(feature, weights[f"{name}.weight"], weights[f"{name}.bias"]))
    return feature


def eagle_weights(layers: int = 1, *, bias: bool = False) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (SIZE, 2 * SIZE), "embed_tokens.weight": (LOGITS_WIDTH, SIZE)}
    if bias:
        shapes["fc.bias"] = (SIZE,)
    for layer in range(layers):
        shapes |= layer_shapes(f"layers.{layer}", SIZE, WIDE, SIZE, HEAD_DIM)
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (SIZE,)
    return random_weights(shapes, seed=4)


def eagle3_weights() -> dict[str, Tensor]:
    shapes = {
        "fc.weight": (SIZE, 3 * SIZE),
        "midlayer.hidden_norm.weight": (SIZE,),
        "midlayer.input_layernorm.weight": (SIZE,),
        "norm.weight": (SIZE,),
        "lm_head.weight": (DRAFT_VOCABULARY, SIZE),
        **layer_shapes("midlayer", SIZE, WIDE, 2 * SIZE, HEAD_DIM),
    }
    chosen = torch.tensor(sorted(np.random.default_rng(1).choice(250, DRAFT_VOCABULARY, replace=False).tolist()))
    inside = torch.zeros(LOGITS_WIDTH, dtype=torch.bool)
    inside[chosen] = True
    return random_weights(shapes, seed=5) | {"d2t": chosen - torch.arange(DRAFT_VOCABULARY), "t2d": inside}


def medusa_weights(heads: int, blocks: int, *, outputs: bool) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            shapes |= {f"{head}.{block}.linear.weight": (SIZE, SIZE), f"{head}.{block}.linear.bias": (SIZE,)}
        if outputs:
            shapes[f"{head}.{blocks}.weight"] = (LOGITS_WIDTH, SIZE)
    return random_weights(shapes, seed=6)


def write_drafters(home: Path) -> Path:
    """The folders target, small, eagle, eagle3 and medusa: a tiny model and who drafts for it, by random weights."""
    write_tiny_model(home / "target")
    write_tiny_model(home / "small", seed=1)
    write_head(home / "eagle", eagle_weights(), CONFIG)
    write_head(home / "eagle3", eagle3_weights(), CONFIG3)
    heads: dict[str, object] = {"medusa_num_heads": 3, "medusa_num_layers": 1}
    write_head(home / "medusa", medusa_weights(3, 1, outputs=False), heads)
    return home
