"""Computes the memory that a model's weights will take, before any of them is read."""

import torch

from troupellm.kernels.linear import packs_copies
from troupellm.kernels.quantized_linear import held_bytes
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.memory.stored_size import StoredSize
from troupellm.models.memory.weight_count import products, weight_count
from troupellm.models.quantization.on_load import WITH_HEAD, int4_blocks_outline, outline_on_load
from troupellm.protocol.config.setting_types import OnLoad


def weight_bytes(
    model: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    mode: OnLoad | None,
    stored: StoredSize | None = None,
) -> int:
    """Upper bound of a model's memory.

    Args:
        dtype: to compute with.
        device: to compute on.
        mode: how weights are quantized on load; a kind without products there is dequantized, and counts so.
        stored: of a quantized checkpoint, which counts as it is unless it is quantized once more.
    """
    if mode is None and stored is not None:
        return stored.nbytes
    plain, total = weight_count(model), 0
    if model.num_parameters is not None:
        copied = model.head == "lm" and model.tie_word_embeddings and packs_copies(device, dtype)
        return (plain + copied * model.vocab_size * model.hidden_size) * dtype.itemsize
    for product in products(model):
        numbers, outline = product.number * product.rows * product.columns, None
        tied = product.head and model.tie_word_embeddings
        if mode is not None and (mode in WITH_HEAD or not product.head):
            outline = outline_on_load(mode, product.rows, product.columns)
            if mode == "int4" and device.type == "cpu":
                outline = int4_blocks_outline(product.rows, product.columns, coarse=product.gate_up)
        if outline is not None:
            total += product.number * held_bytes(outline, device, dtype, experts=product.experts)
            plain -= 0 if tied else numbers
        elif tied and packs_copies(device, dtype):
            plain += numbers
    return plain * dtype.itemsize + total
