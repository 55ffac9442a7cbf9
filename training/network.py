"""The network in training form: a Llama decoder with the projections that share an input fused.

The fused matrices make the small products of a small model larger, which two cores need. The
checkpoint is written with the usual Llama names, so that any Llama loader reads it.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK, BLOCKS = 128, 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096

    def config(self, eos: list[int], pad: int) -> dict[str, Any]:
        """The shipped ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation, computed in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; training rows go block by block, thrice as fast on a CPU as the fused one."""
    length = q.shape[2]
    if length != BLOCK * BLOCKS:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scale = q.shape[3] ** -0.5
    hidden = torch.full((BLOCK, BLOCK), float("-inf"), dtype=q.dtype).triu(1)
    out: list[Tensor] = []
    for start in range(0, length, BLOCK):
        end = start + BLOCK
        scores = torch.matmul(q[:, :, start:end] * scale, k[:, :, :end].transpose(-1, -2))
        scores = scores + F.pad(hidden, (start, 0))
        out.append(torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v[:, :, :end]))
    return torch.cat(out, dim=2)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size, heads = shape.hidden_size, shape.num_attention_heads
        wide = (heads + 2 * shape.num_key_value_heads) * shape.head_dim
        self.input_norm = nn.Parameter(torch.ones(size))
        self.post_norm = nn.Parameter(torch.ones(size))
        self.qkv = nn.Linear(size, wide, bias=False)
        self.out = nn.Linear(heads * shape.head_dim, size, bias=False)
        self.gate_up = nn.Linear(size, 2 * shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and feed-forward, each with its residual."""
        s = self.shape
        batch, length, _ = x.shape
        qkv = self.qkv(norm(x, self.input_norm, s.rms_norm_eps))
        qkv = qkv.view(batch, length, -1, s.head_dim).transpose(1, 2)
        turned = s.num_attention_heads + s.num_key_value_heads
        qk, v = qkv[:, :turned], qkv[:, turned:]
        left, right = qk.float().chunk(2, dim=-1)
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(v.dtype)
        q, k = qk[:, : s.num_attention_heads], qk[:, s.num_attention_heads :]
        groups = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = _attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(norm(x, self.post_norm, s.rms_norm_eps)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class Network(nn.Module):
    """The decoder up to the last norm; ``logits`` applies the tied head to chosen positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(shape.hidden_size))
        half = shape.head_dim // 2
        steps = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(shape.max_position_embeddings).float(), steps)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                scale = 0.02 / (2 * shape.num_hidden_layers) ** 0.5 if deep else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden states of every position."""
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return norm(x, self.final_norm, self.shape.rms_norm_eps)

    def layers(self) -> list[Block]:
        """The decoder layers in order."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def logits(self, hidden: Tensor) -> Tensor:
        """The tied output head."""
        return F.linear(hidden, self.embedding.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights under the usual Llama names, in bfloat16."""
        s = self.shape
        out = {"model.embed_tokens.weight": self.embedding.weight}
        parts = [s.num_attention_heads, s.num_key_value_heads, s.num_key_value_heads]
        for index, block in enumerate(self.layers()):
            at = f"model.layers.{index}."
            q, k, v = torch.split(block.qkv.weight, [part * s.head_dim for part in parts])
            gate, up = block.gate_up.weight.chunk(2)
            out |= {
                f"{at}self_attn.q_proj.weight": q,
                f"{at}self_attn.k_proj.weight": k,
                f"{at}self_attn.v_proj.weight": v,
                f"{at}self_attn.o_proj.weight": block.out.weight,
                f"{at}mlp.gate_proj.weight": gate,
                f"{at}mlp.up_proj.weight": up,
                f"{at}mlp.down_proj.weight": block.down.weight,
                f"{at}input_layernorm.weight": block.input_norm,
                f"{at}post_attention_layernorm.weight": block.post_norm,
            }
        out["model.norm.weight"] = self.final_norm
        return {name: value.detach().to(torch.bfloat16).clone() for name, value in out.items()}

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``checkpoint``."""
        with torch.no_grad():
            self.embedding.weight.copy_(tensors["model.embed_tokens.weight"])
            self.final_norm.copy_(tensors["model.norm.weight"])
            for index, block in enumerate(self.layers()):
                at = f"model.layers.{index}."
                names = [f"{at}self_attn.{part}_proj.weight" for part in "qkv"]
                block.qkv.weight.copy_(torch.cat([tensors[name] for name in names]))
                names = [f"{at}mlp.{part}_proj.weight" for part in ("gate", "up")]
                block.gate_up.weight.copy_(torch.cat([tensors[name] for name in names]))
                block.out.weight.copy_(tensors[f"{at}self_attn.o_proj.weight"])
                block.down.weight.copy_(tensors[f"{at}mlp.down_proj.weight"])
                block.input_norm.copy_(tensors[f"{at}input_layernorm.weight"])
                block.post_norm.copy_(tensors[f"{at}post_attention_layernorm.weight"])
