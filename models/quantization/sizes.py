"""What the weights of a model take once they are quantized."""

import math

import torch

from troupellm.kernels.quantized import stays
from troupellm.models.decoder_config import DecoderConfig
from troupellm.models.quantization.on_load import INT4_GROUPS, WITH_HEAD
from troupellm.protocol.config import OnLoad

BYTES: dict[OnLoad, float] = {"int8": 1.0, "int8-weight-only": 1.0, "int4": 0.5 + 5 / min(INT4_GROUPS), "fp8": 1.0}
"""Per weight; scales of whole rows are counted apart, those of groups are in it."""
PER_ROW = 12
"""Scale, sum of the weights and what rows are padded to."""


def weight_bytes(model: DecoderConfig, numbers: int, dtype: torch.dtype, mode: OnLoad | None) -> int:
    """What `numbers` in the tensors of a model take, of which those of matrix products are quantized by `mode`.

    What a mode has no fast path for on this machine is dequantized while it is loaded, and counts so.
    """
    if mode is None or not stays(mode):
        return numbers * dtype.itemsize
    tables = 1 + (model.head == "lm" and mode not in WITH_HEAD)
    kept = model.hidden_size * (tables * model.vocab_size + model.num_labels + 4 * model.num_layers + 1)
    if model.moe is not None:
        kept += model.hidden_size * model.moe.num_experts * sum(model.moe.layers)
    kept += held_whole(model)
    quantized = max(0, numbers - kept)
    per_weight = BYTES[mode] + PER_ROW / model.hidden_size
    return kept * dtype.itemsize + math.ceil(quantized * per_weight)


def held_whole(model: DecoderConfig) -> int:
    """Weights that latent attention holds in the type to compute with, however they are stored: `kv_b_proj`."""
    if model.mla is None:
        return 0
    return model.num_layers * model.num_heads * (model.mla.plain + model.mla.value) * model.mla.latent
