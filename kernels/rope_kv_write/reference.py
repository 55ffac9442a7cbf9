"""The definition of `rope_kv_write` in plain torch, by those of its parts."""

from torch import Tensor

from troupellm.kernels.kv_quant import as_bytes, encode
from troupellm.kernels.rms_norm.reference import rms_norm_reference
from troupellm.kernels.rope_kv_write import HeadNorms
from troupellm.kernels.rope_kv_write.kv_write_reference import kv_write_reference
from troupellm.kernels.rope_kv_write.rope_reference import rope_reference


def rope_kv_write_reference(
    qkv: Tensor,
    heads: int,
    caches: tuple[Tensor, Tensor],
    rows: Tensor,
    *,
    norms: HeadNorms | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
) -> Tensor:
    """As `rope_kv_write`."""
    turned = (heads + qkv.shape[1]) // 2
    tokens = rows.shape[0] // (turned - heads)
    query, key, value = qkv[:, :heads], qkv[:tokens, heads:turned], qkv[:tokens, turned:]
    if norms is not None:
        query, key = _normed(query, norms.query, norms.eps), _normed(key, norms.key, norms.eps)
    if angles is not None:
        cos, sin = angles
        query = rope_reference(query, cos, sin, interleaved=interleaved)
        key = rope_reference(key, cos[:tokens], sin[:tokens], interleaved=interleaved)
    key, value = (as_bytes(encode(part, cache.dtype)) for part, cache in zip((key, value), caches, strict=True))
    kv_write_reference(key, value, as_bytes(caches[0]), as_bytes(caches[1]), rows)
    return query


def _normed(part: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.shape[0] == part.shape[2]:
        return rms_norm_reference(part, weight, eps)
    return rms_norm_reference(part.flatten(1), weight, eps).view(part.shape)
