"""Greedy decoding of many prompts at once, with a cache, on the training form of the network."""

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from troupellm.training.batches import token_id
from troupellm.training.documents import END_OF_TEXT, TURN_END
from troupellm.training.network import Block, Network, norm

Cache = list[tuple[Tensor, Tensor]]


def _block(block: Block, x: Tensor, turn: tuple[Tensor, Tensor], keep: Tensor, cache: Cache, layer: int) -> Tensor:
    """One layer over the new positions [rows, new, size]; its keys and values join the cache."""
    s = block.shape
    rows, new, _ = x.shape
    qkv = block.qkv(norm(x, block.input_norm, s.rms_norm_eps)).view(rows, new, -1, s.head_dim).transpose(1, 2)
    turned = s.num_attention_heads + s.num_key_value_heads
    left, right = qkv[:, :turned].chunk(2, dim=-1)
    cos, sin = turn
    qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    q, k, v = qk[:, : s.num_attention_heads], qk[:, s.num_attention_heads :], qkv[:, turned:]
    if layer < len(cache):
        k, v = torch.cat((cache[layer][0], k), 2), torch.cat((cache[layer][1], v), 2)
        cache[layer] = (k, v)
    else:
        cache.append((k, v))
    groups = s.num_attention_heads // s.num_key_value_heads
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
    x = x + block.out(mixed.transpose(1, 2).reshape(rows, new, -1))
    gate, up = block.gate_up(norm(x, block.post_norm, s.rms_norm_eps)).chunk(2, dim=-1)
    out: Tensor = x + block.down(F.silu(gate) * up)
    return out


@torch.no_grad()
def greedy(network: Network, tokenizer: Tokenizer, prompts: list[str], limit: int) -> list[str]:
    """Greedy answers to a group of prompts in float32, each up to an end mark or the limit.

    The prompts are padded on the left; rotations are relative, so that a shift of a row changes nothing.
    """
    ends = torch.tensor([token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)])
    asked = [tokenizer.encode(prompt).ids for prompt in prompts]
    width = max(map(len, asked))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in asked])
    real = torch.arange(width) >= torch.tensor([[width - len(row)] for row in asked])
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    # A padding position sees itself, so that no row of the scores is empty.
    keep = ((real[:, None, :] & causal) | torch.eye(width, dtype=torch.bool))[:, None]
    at, cache, said = 0, Cache(), []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(limit):
        x, end = network.embedding(tokens), at + tokens.shape[1]
        turn = network.cos[at:end], network.sin[at:end]
        for layer, block in enumerate(network.layers()):
            x = _block(block, x, turn, keep, cache, layer)
        chosen = network.logits(norm(x[:, -1], network.final_norm, network.shape.rms_norm_eps)).argmax(-1)
        chosen = torch.where(done, ends[0], chosen)
        said.append(chosen)
        done |= torch.isin(chosen, ends)
        if bool(done.all()):
            break
        at, tokens = end, chosen[:, None]
        real = F.pad(real, (0, 1), value=True)
        keep = real[:, None, None, :]
    stopped = set(ends.tolist())
    answers: list[str] = []
    for row in torch.stack(said, dim=1).tolist():
        length = next((index for index, token in enumerate(row) if token in stopped), len(row))
        answers.append(tokenizer.decode(row[:length], skip_special_tokens=False))
    return answers
