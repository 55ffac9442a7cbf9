"""Weights that torchao quantized mean to us what they mean to it.

Not among what tests install: transformers imports torchao wherever it finds it, which slows down every parity test.
`pip install torchao` in an environment of its own runs this.
"""

import importlib.util
import warnings

import pytest
import torch

from troupellm.kernels.linear import linear, pack
from troupellm.kernels.quantized import Int8Channel, Int8WeightOnly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
]


@pytest.mark.parametrize(("kind", "most"), [(Int8WeightOnly, 1e-5), (Int8Channel, 0.012)])
def test_products_are_those_of_torchao(kind: type[Int8Channel] | type[Int8WeightOnly], most: float) -> None:
    """With inputs in eight bits it takes max|x| / 127.5 for their scale where we take 127: that is the difference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(128, 96)
    layer.weight.data = torch.randn(96, 128, generator=generator)
    x = torch.randn(7, 128, generator=generator)
    config = Int8WeightOnlyConfig() if kind is Int8WeightOnly else Int8DynamicActivationInt8WeightConfig()
    quantize_(layer, config)
    with torch.no_grad():
        expected = layer(x)
    weight = kind(layer.weight.qdata, layer.weight.scale.reshape(-1))
    assert torch.allclose(weight.dequantize(), layer.weight.dequantize(), atol=1e-6)
    error = (linear(x, pack(weight, layer.bias.detach())) - expected).pow(2).mean().sqrt()
    assert error < most * expected.pow(2).mean().sqrt()
