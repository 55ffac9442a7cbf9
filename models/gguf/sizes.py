"""Memory of a GGUF file's tensors once they are loaded, from its header."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from math import prod

import torch

from troupellm.kernels.quantized import held_bytes
from troupellm.kernels.quantized.gguf import LAYOUTS, blocks_outline
from troupellm.models.gguf.header import StoredTensor

_MERGED = re.compile(r"(.*)\b(?:attn_[qkv]|ffn_(?:gate|up)(_exps|_shexp)?)\.weight")
"""Tensors of which several are computed as one product: queries, keys and values; gate and up."""
_EXPERTS = "_exps."


def tensors_bytes(
    tensors: Mapping[str, StoredTensor], whole: Collection[str], dtype: torch.dtype, device: torch.device
) -> int:
    """At most the memory of all tensors.

    Args:
        tensors: by their names in the file.
        whole: names of tensors that are dequantized, such as the embedding.
        dtype, device: to compute with and on.
    """
    types = defaultdict(set)
    for name, tensor in tensors.items():
        types[_product(name)].add(tensor.type)
    total = 0
    for name, tensor in tensors.items():
        together, experts = types[_product(name)], _EXPERTS in name
        if name in whole or len(tensor.shape) < 2 or not _stays(together, device, experts=experts):
            total += prod(tensor.shape) * dtype.itemsize
            continue
        rows, columns = tensor.shape[-2:]
        outline = blocks_outline(tensor.type, rows, columns)
        total += prod(tensor.shape[:-2]) * held_bytes(outline, device, dtype, experts=experts)
    return total


def _product(name: str) -> str:
    """The same text for all tensors that are merged into one product."""
    match = _MERGED.fullmatch(name)
    return name if match is None else f"{match[1]}{'attn' if 'attn_' in name else 'ffn'}{match[2] or ''}"


def _stays(types: set[str], device: torch.device, *, experts: bool) -> bool:
    """Whether a product of these types is computed in its blocks.

    A plain part has all of them dequantized. The experts of a GPU are stacked, for which they must be of one type.
    """
    return types <= LAYOUTS.keys() and (device.type == "cpu" or not experts or len(types) == 1)
