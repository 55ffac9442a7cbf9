"""Linear layers of models of `transformers`, by our products: packed, quantized at load, or as they are stored."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from troupellm.kernels.linear import linear, pack
from troupellm.kernels.quantized_linear import Weight
from troupellm.models.quantization.on_load import HEAD, TURNED, WITH_HEAD, quantized
from troupellm.protocol.config.setting_types import OnLoad

WHOLE = ("gate", "router", "shared_expert_gate", "score")
"""Last names of layers that choose experts or classes, which are never quantized at load."""


class PackedLayer(Module):
    """In the place of an `nn.Linear`, with the same result."""

    def __init__(self, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = pack(weight, bias)
        self.in_features, self.out_features = self.packed.in_features, self.packed.out_features
        self.weight = torch.empty(0, dtype=dtype)
        """Holds no numbers: some models ask a layer for its type."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features).contiguous()
        out = linear(rows, self.packed) if rows.shape[0] else x.new_empty(0, self.out_features)
        return out.view(*x.shape[:-1], self.out_features)


@torch.no_grad()
def pack_layers(model: Any, mode: OnLoad | None) -> None:
    """Put a `PackedLayer` in the place of every plain linear layer, one by one.

    Args:
        model: of `transformers`, with weights.
        mode: how its weights are quantized on the way.
    """
    for name, layer in list(model.named_modules()):
        if type(layer) is Linear:
            bias = None if layer.bias is None else layer.bias.data
            weight = on_load(name, layer.weight.data, mode)
            model.set_submodule(name, PackedLayer(weight, bias, layer.weight.dtype))


def on_load(name: str, weight: Weight, mode: OnLoad | None) -> Weight:
    """The weight of a layer in that mode; heads, routers and classifiers stay where those of our own families do."""
    last = name.rpartition(".")[2]
    stays = last in WHOLE or name.endswith(TURNED) or (last == HEAD and mode not in WITH_HEAD)
    return weight if mode is None or stays else quantized(weight, mode)


def with_layers(kind: Any, layers: Mapping[str, PackedLayer]) -> Any:
    """The class of models `kind`, whose instances have these layers from the beginning, and no weights there."""

    def begin(self: Any, *args: Any, **options: Any) -> None:
        kind.__init__(self, *args, **options)
        for name, layer in layers.items():
            self.set_submodule(name, layer)

    # The library looks up its renaming of tensors by the names of the class and its module.
    return type(kind.__name__, (kind,), {"__init__": begin, "__module__": kind.__module__})
