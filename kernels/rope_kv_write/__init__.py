"""All that lies between the projection and the attention: norms of heads, rotation, and storing keys and values."""

from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.rms_norm import rms_norm
from troupellm.kernels.rope_kv_write.kv_write import kv_write
from troupellm.kernels.rope_kv_write.rope import rope


class HeadNorms(NamedTuple):
    """Norms of queries and keys."""

    query: Tensor
    """[head_dim] of every head, or [heads * head_dim] of all together; of a type as `rms_norm` has it."""
    key: Tensor
    eps: float


def rope_kv_write(
    qkv: Tensor,
    heads: int,
    caches: tuple[Tensor, Tensor],
    rows: Tensor,
    *,
    norms: HeadNorms | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Norm and rotate queries and keys; write keys and values to the cache.

    Args:
        qkv: [rows, heads + 2 * kv_heads, head_dim], any float type; the numbers of a head lie side by side.
        heads: of queries.
        caches: as `kv_write` has them.
        rows: `kv_rows` of the first tokens; there may be more rows in `qkv`, whose keys are not written.
        angles: `cos` and `sin` as `rope` has them, for all rows; None rotates nothing.

    Returns:
        queries [rows, heads, head_dim], the numbers of a head side by side.
    """
    if by_kernels(qkv.device):
        from troupellm.kernels.rope_kv_write.triton_rope import rope_kv_write_triton

        return rope_kv_write_triton(qkv, heads, caches, rows, norms=norms, angles=angles, interleaved=interleaved)
    turned = (heads + qkv.shape[1]) // 2
    tokens = rows.shape[0] // (turned - heads)
    qk = qkv[:, :turned]
    if norms is not None:
        query = head_norm(qk[:, :heads], norms.query, norms.eps)
        qk = torch.cat((query, head_norm(qk[:, heads:], norms.key, norms.eps)), dim=1)
    if angles is not None:
        qk = rope(qk, *angles, interleaved=interleaved)
    kv_write(qk[:tokens, heads:], qkv[:tokens, turned:], *caches, rows)
    return qk[:, :heads]


def head_norm(part: Tensor, weight: Tensor, eps: float) -> Tensor:
    """part: [rows, heads, head_dim]; the weight says whether every head is normed, or all heads together."""
    if weight.shape[0] == part.shape[2]:
        return rms_norm(part, weight, eps)
    return rms_norm(part.flatten(1), weight, eps).view(part.shape)
