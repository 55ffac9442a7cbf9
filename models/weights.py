"""Where a model's weights come from: plain safetensors, quantized ones, or a GGUF file."""

from collections.abc import Callable
from pathlib import Path

import torch

from troupellm.models.checkpoint import Checkpoint
from troupellm.models.decoder_config import DecoderConfig
from troupellm.models.gguf.header import is_gguf
from troupellm.models.gguf.weights import GgufWeights
from troupellm.models.quantization.checkpoint import Format, QuantizedCheckpoint

StoredWeights = Checkpoint | GgufWeights


def open_weights(
    folder: Path,
    model: DecoderConfig,
    form: Format | None,
    dtype: torch.dtype,
    taken: Callable[[int], None] = lambda _: None,
) -> StoredWeights:
    """
    Args:
        folder: in Hugging Face's format, or a GGUF file.
        form: how its weights are quantized, from config.json.
        dtype: what products are computed in.
        taken: called with the bytes of each tensor.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    if is_gguf(folder):
        return GgufWeights(folder, dtype, model.head_dim, taken)
    return Checkpoint(folder, dtype, taken) if form is None else QuantizedCheckpoint(folder, dtype, taken, form)
