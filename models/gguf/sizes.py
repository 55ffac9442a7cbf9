"""Memory of a GGUF file's tensors once they are loaded, from its header."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from math import ceil, prod

import torch

from troupellm.kernels.quantized_linear import held_bytes
from troupellm.kernels.quantized_linear.gguf import LAYOUTS, blocks_outline
from troupellm.models.hub.gguf_header import StoredTensor

_MERGED = re.compile(r"(.*)\b(attn|ffn)_(?:[qkv]|gate|up)(_exps|_shexp|\.\d+)?\.weight")
"""Tensors of which several are computed as one product: queries, keys and values; gate and up."""
_EXPERTS = re.compile(r".*(_exps|_(?:gate|up|down)\.\d+)\.weight")
"""Names of tensors of all experts, or of one in older files."""
_ROUTER = ".ffn_gate_inp"
_ROWS, _BIASES = 64, 16
"""Rows of plain weights and numbers of biases are padded to multiples of these on a CPU, at most."""


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
        experts = _EXPERTS.fullmatch(name) is not None
        packed = name not in whole and (len(tensor.shape) == 2 or experts)
        if packed and _stays(types[_product(name)], device, experts=experts):
            outline = blocks_outline(tensor.type, *tensor.shape[-2:])
            total += prod(tensor.shape[:-2]) * held_bytes(outline, device, dtype, experts=experts)
        else:
            total += _plain_numbers(name, tensor.shape) * dtype.itemsize
    return total


def _plain_numbers(name: str, shape: tuple[int, ...]) -> int:
    """At most the numbers that are held of a tensor which is plain or dequantized."""
    if name.endswith(".bias"):  # compiled products have a padded copy
        return prod(shape[:-1]) * (shape[-1] + ceil(shape[-1] / _BIASES) * _BIASES)
    if len(shape) == 1 and _ROUTER not in name:
        return shape[0]
    rows = shape[-2] if len(shape) > 1 else 1
    return prod(shape[:-2]) * ceil(rows / _ROWS) * _ROWS * shape[-1]


def _product(name: str) -> str:
    """A text that is equal for all tensors that are merged into one product."""
    match = _MERGED.fullmatch(name)
    return name if match is None else f"{match[1]}{match[2]}{match[3] or ''}"


def _stays(types: set[str], device: torch.device, *, experts: bool) -> bool:
    """True if a product with these types is computed in its blocks, without dequantizing them first.

    A part with an unquantized tensor has all of them dequantized. A GPU's experts are stacked, so they need one type.
    """
    return types <= LAYOUTS.keys() and (device.type == "cpu" or not experts or len(types) == 1)
