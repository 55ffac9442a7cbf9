"""Layers behind the pooling of an encoder (sentence-transformers' module Dense)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from troupellm.kernels.linear import linear, pack
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.config.pooling_config import DenseModule
from troupellm.protocol.errors import ModelLoadError


class PooledDense:
    """One product after the other, each with its activation."""

    def __init__(self, folder: Path, modules: Sequence[DenseModule], width: int) -> None:
        """Read the weights, in float32.

        Args:
            folder: of the model; each module has its own folder in it.
            width: numbers of a pooled hidden state.

        Raises:
            ModelLoadError: a file is missing or damaged, or the sizes do not fit.
        """
        self._layers = []
        for module in modules:
            if module.in_features != width:
                raise ModelLoadError(f"{module.folder}: in_features is {module.in_features}, but {width} come in")
            stored, width = Checkpoint(folder / module.folder, torch.float32), module.out_features
            weight = stored.take("linear.weight", (module.out_features, module.in_features))
            bias = stored.take("linear.bias", (module.out_features,)) if module.bias else None
            stored.finish()
            self._layers.append((pack(weight, bias), module.tanh))

    def __call__(self, pooled: Tensor) -> Tensor:
        """float32 [rows, hidden] to [rows, out_features of the last]."""
        for weight, tanh in self._layers:
            pooled = linear(pooled, weight)
            if tanh:
                pooled = pooled.tanh()
        return pooled
