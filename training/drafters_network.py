"""The drafters in training form: an EAGLE head, Medusa heads and a small Llama, with their public checkpoint layouts.

All three share the built-in model's vocabulary; the two heads share its embedding and its output matrix too, read its
hidden states after the last norm, and so hold only their own weights.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from troupellm.training.network import Network, Shape, norm

HEADS, BLOCKS = 4, 2
"""How many tokens after the next one Medusa foretells, and how many residual blocks each of its heads has."""
SMALL = Shape(
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
"""The draft model: less than a tenth of the built-in model's parameters, half of them in the embedding."""


class Eagle(nn.Module):
    """The head of EAGLE (Li et al., 2024): one decoder layer that goes on in the features of the model.

    From the feature at a position and the embedding of the token after it, it foretells the next feature. Its layer has
    no norm before the attention; the foretold feature goes through the model's own output matrix, unnormed.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, target: Network) -> None:
        super().__init__()
        self.shape = s = target.shape
        size, wide = s.hidden_size, (s.num_attention_heads + 2 * s.num_key_value_heads) * s.head_dim
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.qkv = nn.Linear(size, wide, bias=False)
        self.out = nn.Linear(s.num_attention_heads * s.head_dim, size, bias=False)
        self.post_norm = nn.Parameter(torch.ones(size))
        self.gate_up = nn.Linear(size, 2 * s.intermediate_size, bias=False)
        self.down = nn.Linear(s.intermediate_size, size, bias=False)
        self.register_buffer("cos", target.cos, persistent=False)
        self.register_buffer("sin", target.sin, persistent=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)
        with torch.no_grad():
            # It begins by handing the feature through, which is better than noise.
            self.fc.weight[:, size:] += torch.eye(size)

    def chain(self, embedded: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """The features foretold at every position by the first, second, ... link of a chain of drafts.

        Link n reads what link n-1 foretold, as when drafting, and true features for all that lies before the chain:
        the training of HASS and EAGLE-3, in which nothing is learned from inputs that drafting never sees.

        Args:
            embedded: of the token after each position, [rows, length, size].
            features: at each position, [rows, length, size].
            depth: links.

        Returns:
            Per link [rows, length, size]: at index i the feature of position i + 1. The first n entries of link n + 1
            have no chain behind them and mean nothing.
        """
        out: list[Tensor] = []
        seen: list[tuple[Tensor, Tensor]] = []
        for link in range(depth):
            features = self._link(embedded, features, seen, link)
            out.append(features)
            features = F.pad(features[:, :-1], (0, 0, 1, 0))
        return out

    def _link(self, embedded: Tensor, features: Tensor, seen: list[tuple[Tensor, Tensor]], link: int) -> Tensor:
        s = self.shape
        rows, length, _ = features.shape
        x = self.fc(torch.cat((embedded, features), dim=-1))
        qkv = self.qkv(x).view(rows, length, -1, s.head_dim).transpose(1, 2)
        turned = s.num_attention_heads + s.num_key_value_heads
        left, right = qkv[:, :turned].float().chunk(2, dim=-1)
        cos, sin = self.cos[:length], self.sin[:length]
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(qkv.dtype)
        groups = s.num_attention_heads // s.num_key_value_heads
        k = qk[:, s.num_attention_heads :].repeat_interleave(groups, dim=1)
        v = qkv[:, turned:].repeat_interleave(groups, dim=1)
        seen.append((k, v))
        mixed = _attend(qk[:, : s.num_attention_heads] * s.head_dim**-0.5, seen, link)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(norm(x, self.post_norm, s.rms_norm_eps)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights under the names of EAGLE's checkpoints."""
        s = self.shape
        parts = [s.num_attention_heads, s.num_key_value_heads, s.num_key_value_heads]
        q, k, v = torch.split(self.qkv.weight, [part * s.head_dim for part in parts])
        gate, up = self.gate_up.weight.chunk(2)
        at = "layers.0."
        return {
            "fc.weight": self.fc.weight,
            f"{at}self_attn.q_proj.weight": q,
            f"{at}self_attn.k_proj.weight": k,
            f"{at}self_attn.v_proj.weight": v,
            f"{at}self_attn.o_proj.weight": self.out.weight,
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": self.down.weight,
            f"{at}post_attention_layernorm.weight": self.post_norm,
        }

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``checkpoint``."""
        at = "layers.0."
        with torch.no_grad():
            self.fc.weight.copy_(tensors["fc.weight"])
            self.qkv.weight.copy_(torch.cat([tensors[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"]))
            self.gate_up.weight.copy_(torch.cat([tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up")]))
            self.out.weight.copy_(tensors[f"{at}self_attn.o_proj.weight"])
            self.down.weight.copy_(tensors[f"{at}mlp.down_proj.weight"])
            self.post_norm.copy_(tensors[f"{at}post_attention_layernorm.weight"])

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """Its ``config.json``: the model's with one layer."""
        return target | {"num_hidden_layers": 1, "bias": False, "torch_dtype": "float16"}


def _attend(q: Tensor, seen: list[tuple[Tensor, Tensor]], link: int) -> Tensor:
    """Attention of one link: over true features up to where its chain begins, then over the chain itself.

    Args:
        q: scaled, [rows, heads, length, head size].
        seen: keys and values of this link and those before it, of the same shape.
        link: 0 for the first.
    """
    length = q.shape[2]
    hidden = torch.full((length, length), float("-inf")).triu(1 - link)
    scores = torch.matmul(q, seen[0][0].transpose(-1, -2)).float() + hidden
    own = [_later(k, link - at) for at, (k, _) in enumerate(seen)][1:]
    scores = torch.cat([scores, *((q * k).sum(-1, keepdim=True).float() for k in own)], dim=-1)
    shares = torch.softmax(scores, -1).to(q.dtype)
    mixed = torch.matmul(shares[..., :length], seen[0][1])
    for at, (_, v) in enumerate(seen[1:], 1):
        mixed = mixed + shares[..., length + at - 1, None] * _later(v, link - at)
    return mixed


def _later(x: Tensor, by: int) -> Tensor:
    """Every position gets what stood ``by`` positions before it."""
    return F.pad(x[:, :, : x.shape[2] - by], (0, 0, by, 0)) if by else x


class Medusa(nn.Module):
    """Medusa's heads (Cai et al., 2024): residual blocks on the model's feature, then the model's own output matrix."""

    def __init__(self, target: Network) -> None:
        super().__init__()
        size = target.shape.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(HEADS * BLOCKS))
        for block in self.linears():
            nn.init.normal_(block.weight, std=0.02)
            nn.init.zeros_(block.bias)

    def linears(self) -> list[nn.Linear]:
        """The blocks in order, those of the first head first."""
        return [block for block in self.blocks if isinstance(block, nn.Linear)]

    def forward(self, features: Tensor, head: int) -> Tensor:
        """The input of the output matrix for the token ``head + 2`` after each feature."""
        for block in self.linears()[head * BLOCKS : (head + 1) * BLOCKS]:
            features = features + F.silu(block(features))
        return features

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights under the names of Medusa's checkpoints."""
        out: dict[str, Tensor] = {}
        for index, block in enumerate(self.linears()):
            at = f"{index // BLOCKS}.{index % BLOCKS}.linear."
            out |= {f"{at}weight": block.weight, f"{at}bias": block.bias}
        return out

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of ``checkpoint``."""
        with torch.no_grad():
            for index, block in enumerate(self.linears()):
                at = f"{index // BLOCKS}.{index % BLOCKS}.linear."
                block.weight.copy_(tensors[f"{at}weight"])
                block.bias.copy_(tensors[f"{at}bias"])

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """Its ``config.json``, with the keys of both spellings that are in use."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target["hidden_size"],
            "vocab_size": target["vocab_size"],
            "medusa_num_heads": HEADS,
            "medusa_num_layers": BLOCKS,
            "num_heads": HEADS,
            "num_hidden_layers": BLOCKS,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "torch_dtype": "float16",
        }
