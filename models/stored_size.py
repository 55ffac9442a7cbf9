"""What the weights of a quantized checkpoint will take in memory, told from the headers of its files."""

from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

import torch

from troupellm.kernels.quantized import stays
from troupellm.models.checkpoint import Checkpoint
from troupellm.models.decoder_config import DecoderConfig
from troupellm.models.gguf.config import EMBEDDING
from troupellm.models.gguf.header import is_gguf, read_header
from troupellm.models.quantization.checkpoint import Format
from troupellm.models.quantization.on_load import TURNED
from troupellm.models.quantization.sizes import held_whole

CODES_GROW = 1.5
"""Scales become float32 and codes of six bits whole bytes."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Tensors of these types are converted, all others hold codes."""


class StoredSize(NamedTuple):
    """Of one checkpoint."""

    method: str
    """How it is quantized."""
    nbytes: int | None
    """At most; None where weights are dequantized while they are read."""


def stored_size(folder: Path, model: DecoderConfig, form: Format | None, dtype: torch.dtype) -> StoredSize | None:
    """None for a plain checkpoint.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    file = is_gguf(folder)
    if form is None and not file:
        return None
    method = "gguf" if form is None else form.method
    if not stays("int4") or dtype != torch.float32:
        return StoredSize(method, None)
    numbers, codes = _in_blocks(folder) if file else _in_tensors(folder)
    if model.tie_word_embeddings and model.head == "lm":  # a packed copy of the embedding is the head
        numbers += model.vocab_size * model.hidden_size
    numbers += held_whole(model)
    return StoredSize(method, numbers * dtype.itemsize + ceil(CODES_GROW * codes))


def _in_tensors(folder: Path) -> tuple[int, int]:
    """Numbers that are converted, and bytes of codes."""
    numbers = codes = 0
    checkpoint = Checkpoint(folder, torch.float32)
    for name in checkpoint.names():
        if any(f"{end}." in name for end in TURNED):  # counted by `held_whole`
            continue
        count = prod(checkpoint.shape_of(name) or ())
        kind = checkpoint.type_of(name) or ""
        if kind in FLOATS:
            numbers += count
        else:
            codes += count * int(kind.partition("_")[0].lstrip("FIUBOL") or 8) // 8
    return numbers, codes


def _in_blocks(path: Path) -> tuple[int, int]:
    """The same of a GGUF file."""
    numbers = codes = 0
    for name, tensor in read_header(path).tensors.items():
        if tensor.type in FLOATS or name == EMBEDDING:
            numbers += prod(tensor.shape)
        else:
            codes += tensor.nbytes
    return numbers, codes
