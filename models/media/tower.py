"""The encoder and projector of a checkpoint, by `transformers`: from prepared images to embeddings of the decoder."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import is_other_part
from troupellm.models.media.description import MediaModel
from troupellm.models.transformers_backend.describe import hf_config
from troupellm.models.transformers_backend.pretrained import load_pretrained, refuse_tensors
from troupellm.protocol.messages.media import MediaItem

_LANGUAGE = ("lm_head", "model.language_model.", "model.text_model.")
"""How the names of tensors begin, in `transformers`, that the encoder does without."""
_TEXT_MODULES = ("language_model", "text_model")
_FEW = 8
"""Tokens of the vocabulary of the text part that is built beside the encoder and dropped."""


class Tower:
    """Encodes one image at a time, so that its embeddings depend on nothing else."""

    def __init__(self, body: Any, hidden_size: int, device: torch.device) -> None:
        """body: the model of `transformers`, without its text part."""
        self._body, self._hidden_size, self._device = body, hidden_size, device
        self.dtype: torch.dtype = next(body.parameters()).dtype

    @torch.inference_mode()
    def encode(self, item: MediaItem) -> Tensor:
        """Embeddings [vectors, hidden] of an image, on the device.

        An image whose embeddings are not as many as its places gets NaN, which fails its request alone.
        """
        inputs = {tensor.name: self._tensor(tensor.data, tensor.dtype, tensor.shape) for tensor in item.tensors}
        found = self._body.get_image_features(**inputs).pooler_output
        parts = [found] if isinstance(found, Tensor) else list(found)
        vectors = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        wanted = (item.num_vectors, self._hidden_size)
        if tuple(vectors.shape) != wanted:
            return torch.full(wanted, float("nan"), dtype=self.dtype, device=self._device)
        return vectors

    def _tensor(self, data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
        array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
        given = torch.from_numpy(array.copy()).to(self._device)
        return given.to(self.dtype) if given.is_floating_point() else given


def read_tower(folder: Path, model: MediaModel, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tower:
    """The encoder with its weights, every tensor of it read once and none left over.

    Raises:
        ModelLoadError: a file is missing or damaged, or its tensors are not those of the encoder.
    """
    import transformers
    from transformers.utils import logging

    settings = hf_config(folder)
    _shrink(settings.text_config)
    kind = getattr(transformers, model.architecture)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # the text part is missing on purpose
    try:
        whole, unexpected = load_pretrained(
            kind, folder, settings, dtype, tensors=_own_tensors(folder), spared=_LANGUAGE
        )
    finally:
        logging.set_verbosity(level)
    refuse_tensors("unexpected", unexpected)
    body = whole.model
    for name in _TEXT_MODULES:
        if hasattr(body, name):
            setattr(body, name, None)
    return Tower(body.eval().to(device), hidden_size, device)


def tower_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Memory of an encoder's weights.

    Raises:
        ModelLoadError: a file is missing or damaged.
    """
    stored = Checkpoint(folder, dtype)
    return sum(prod(stored.shape_of(name) or ()) for name in stored.names() if is_other_part(name)) * dtype.itemsize


def _own_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint outside its text part."""
    stored = Checkpoint(folder, torch.float32)
    names = [name for name in stored.names() if is_other_part(name)]
    found = {}
    for name in names:
        kind, shape = stored.type_of(name), stored.shape_of(name)
        assert kind is not None
        assert shape is not None
        found[name] = stored.raw(name, shape, kind)
    return found


def _shrink(text: Any) -> None:
    """Leave nothing of the text part but its width."""
    text.num_hidden_layers, text.vocab_size = 0, _FEW
    text.pad_token_id = None
    for name in ("layer_types", "no_rope_layers"):
        if isinstance(getattr(text, name, None), list):
            setattr(text, name, [])
