"""Single weights of a checkpoint, read anew for adapters that are made for its numbers."""

from pathlib import Path

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.adapters.sites import EMBEDDING
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.checkpoint.weight_names import FIRST, HEAD, decoder_weights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.layers.decoder import EMBEDDING as EMBEDDING_NAME
from troupellm.models.load.read_decoder import open_weights, quantizing
from troupellm.models.quantization.checkpoint import QuantizationFormat
from troupellm.protocol.config.engine import ModelConfig


class StoredBase:
    """As `BaseWeights`, of a folder or a GGUF file. Every call opens it again, so calls may come from any thread."""

    def __init__(
        self,
        folder: Path,
        model: DecoderConfig,
        form: QuantizationFormat | None,
        config: ModelConfig,
        dtype: torch.dtype,
    ) -> None:
        """form: how the weights are stored, if quantized."""
        self._folder, self._model, self._form, self._config, self._dtype = folder, model, form, config, dtype

    def stored(self, module: str, shape: tuple[int, int]) -> Tensor | None:
        if self._form is not None or is_gguf(self._folder):
            return None
        return self._source().take(f"{self._name(module)}.weight", shape)

    def computed(self, module: str, shape: tuple[int, int], *, bias: bool) -> tuple[Tensor, Tensor | None] | None:
        source, name = self._source(), self._name(module)
        weight = quantizing(source, self._config).linear(name, shape)
        plain = weight.dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight
        return plain, source.take(f"{name}.bias", shape[:1]) if bias else None

    def _name(self, module: str) -> str:
        tied = module == HEAD and self._model.tie_word_embeddings
        if module == EMBEDDING or tied:
            return EMBEDDING_NAME.removesuffix(".weight")
        return module if module == HEAD else f"{FIRST}{module}"

    def _source(self) -> WeightSource:
        stored = open_weights(self._folder, self._model, self._form, self._dtype)
        return decoder_weights(self._model, stored, EMBEDDING_NAME)
