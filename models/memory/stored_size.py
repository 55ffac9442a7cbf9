"""Computes the memory that a quantized checkpoint's weights will take, from the headers of its files."""

from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from troupellm.kernels.linear import packs_copies
from troupellm.kernels.quantized_linear import held_bytes, in_blocks
from troupellm.kernels.quantized_linear.gguf import LAYOUTS, blocks_outline
from troupellm.models.checkpoint.mxfp4_experts import BLOCKS, SCALES, experts_outline
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.gguf_metadata import EMBEDDING as EMBEDDING_BLOCKS
from troupellm.models.gguf.sizes import tensors_bytes
from troupellm.models.hub.gguf_header import is_gguf, read_header
from troupellm.models.layers.decoder import EMBEDDING
from troupellm.models.quantization.checkpoint import QuantizationFormat, QuantizedCheckpoint, layer_of
from troupellm.models.quantization.on_load import TURNED

TURNED_BLOCKS = (".attn_kv_b.weight", ".attn_k_b.weight", ".attn_v_b.weight")
"""As `TURNED`, in GGUF files."""
EXPERTS = ".experts."
"""Within the names of their layers."""


class StoredSize(NamedTuple):
    """Size of one checkpoint."""

    method: str
    """Quantization method."""
    nbytes: int
    """Upper bound of the memory once it is loaded; weights without a product in their codes count as dequantized."""


def stored_size(
    folder: Path, model: DecoderConfig, form: QuantizationFormat | None, dtype: torch.dtype, device: torch.device
) -> StoredSize | None:
    """None for a plain checkpoint, and for a GGUF file that `transformers` runs, whose weights are expanded.

    Args:
        dtype: to compute with.
        device: to compute on.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    foreign = model.implementation == "transformers"
    if foreign and (form is None or is_gguf(folder)):
        return None
    tied = model.tie_word_embeddings and model.head == "lm"
    copy = model.vocab_size * model.hidden_size * dtype.itemsize if tied and packs_copies(device, dtype) else 0
    if is_gguf(folder):
        tensors = read_header(folder).tensors
        whole = [name for name in tensors if name.endswith(TURNED_BLOCKS)]
        embedding = tensors.get(EMBEDDING_BLOCKS)
        if embedding is not None and embedding.type in LAYOUTS:
            outline = blocks_outline(embedding.type, *embedding.shape)
            packed = in_blocks(outline, device, dtype)  # and the head is the same weight, if it is tied
            copy = held_bytes(outline, device, dtype) if tied and not packed else 0
            whole += [] if packed else [EMBEDDING_BLOCKS]
        total = tensors_bytes(tensors, whole, dtype, device)
        return StoredSize("gguf", total + copy)
    if form is None:
        return None
    stored = QuantizedCheckpoint(folder, dtype, lambda _: None, form)
    if not foreign or model.text_part:
        decoder_weights(model, stored, EMBEDDING)  # removes the tensors that are not served
    return StoredSize(form.method, checkpoint_bytes(stored, dtype, device, experts_merge=foreign) + copy)


def checkpoint_bytes(
    stored: Checkpoint, dtype: torch.dtype, device: torch.device, prefix: str = "", *, experts_merge: bool = False
) -> int:
    """Upper bound of the memory that the tensors whose names begin with `prefix` take once they are loaded.

    Args:
        experts_merge: experts are dequantized and put together, as models of `transformers` have them.

    Raises:
        ModelLoadError: a layer is not stored as the configuration says.
    """
    quantized: dict[str, bool] = {}
    total = 0
    for name in [name for name in stored.names() if name.startswith(prefix)]:
        layer = layer_of(name)
        if layer not in quantized:
            outline = stored.form.outline(stored, layer) if isinstance(stored, QuantizedCheckpoint) else None
            quantized[layer] = outline is not None
            if outline is not None and (layer.endswith(TURNED) or (experts_merge and EXPERTS in layer)):
                total += outline.rows * outline.columns * dtype.itemsize
            elif outline is not None:
                total += held_bytes(outline, device, dtype, experts=EXPERTS in layer)
        if not quantized[layer] or name == f"{layer}.bias":
            total += _tensor_bytes(stored, name, dtype, device)
    return total


def _tensor_bytes(stored: Checkpoint, name: str, dtype: torch.dtype, device: torch.device) -> int:
    """Memory of a tensor outside quantized layers; it may hold the weights of all experts."""
    shape = stored.shape_of(name) or ()
    if name.endswith(BLOCKS):
        return held_bytes(experts_outline(shape), device, dtype, experts=True)
    if name.endswith(SCALES) and stored.has(name.removesuffix(SCALES) + BLOCKS):
        return 0
    return prod(shape) * dtype.itemsize
