"""Storing new keys and values in the paged KV cache."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.kv_quant import as_bytes, encode
from troupellm.kernels.rope_kv_write.kv_write_reference import kv_write_reference


def kv_rows(slots: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Where each head of each token lies in a cache seen as [blocks * kv_heads * block_size, head_dim].

    Args:
        slots: int64 [tokens]; block * block_size + place within the block.

    Returns:
        int64 [tokens * kv_heads], token by token. Computed once per step, used by every layer.
    """
    heads = slots.new_tensor(range(num_kv_heads))
    blocks, places = slots.div(block_size, rounding_mode="floor"), slots.remainder(block_size)
    return ((blocks[:, None] * num_kv_heads + heads) * block_size + places[:, None]).flatten()


def host_kv_rows(blocks: NDArray[np.int64], places: NDArray[np.int64], num_kv_heads: int, block_size: int) -> Tensor:
    """`kv_rows` on a CPU, of blocks and places within them, [tokens] each."""
    rows = (blocks[:, None] * num_kv_heads + np.arange(num_kv_heads)) * block_size + places[:, None]
    return torch.from_numpy(rows.reshape(-1))


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Tensor) -> None:
    """Write keys and values to their rows.

    Args:
        key: [tokens, kv_heads, head_dim], any strides.
        value: like `key`.
        key_cache: [blocks, kv_heads, block_size, head_dim], contiguous, the type of `key`, or one of those of
            `kernels.kv_quant` with rows of its width; written to.
        value_cache: like `key_cache`.
        rows: from `kv_rows`; no row twice.
    """
    if by_kernels(key.device) and key.stride(-1) == value.stride(-1) == 1:
        from troupellm.kernels.rope_kv_write.triton_rope import kv_write_triton

        kv_write_triton(key, value, key_cache, value_cache, rows)
        return
    if key_cache.dtype != key.dtype:
        key, value = encode(key, key_cache.dtype), encode(value, value_cache.dtype)
        key, value, key_cache, value_cache = (as_bytes(x) for x in (key, value, key_cache, value_cache))
    if key.device.type != "cpu":
        kv_write_reference(key, value, key_cache, value_cache, rows)
        return
    size = key.shape[-1]
    key_cache.view(-1, size).index_copy_(0, rows, key.reshape(-1, size))
    value_cache.view(-1, size).index_copy_(0, rows, value.reshape(-1, size))
