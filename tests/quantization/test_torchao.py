"""Weights that torchao quantized mean to us what they mean to it, and ours are no worse than its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from troupellm.kernels.linear import linear, pack
from troupellm.kernels.quantized_linear import Fp8, Int4Group, Int8Channel, Int8WeightOnly, QuantizedWeight
from troupellm.models.quantization.on_load import QUANTIZE
from troupellm.protocol.config.setting_types import OnLoad
from troupellm.tests.support.environment.absence import absent

pytestmark = pytest.mark.slow

FOLDER = Path(sys.prefix) / "torchao"
SCRIPT = Path(__file__).parents[1] / "support" / "quantized" / "torchao_reference.py"
Parts = dict[str, Tensor]
READ: dict[str, Callable[[Parts], QuantizedWeight]] = {
    "int8": lambda parts: Int8Channel(parts["codes"], parts["scale"].flatten()),
    "int8-weight-only": lambda parts: Int8WeightOnly(parts["codes"], parts["scale"].reshape(-1, 1)),
    "int4": lambda parts: Int4Group.from_values(parts["codes"] + 8, parts["scale"], zero=parts["zero"] + 8),
    "fp8": lambda parts: Fp8(parts["codes"], parts["scale"].flatten()),
}
MOST = {"int8": 0.012}
"""With inputs in eight bits it takes max|x| / 127.5 for their scale where we take 127: that is the difference."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    if not FOLDER.is_dir():
        absent("torchao", "`make torchao` installs it")
    file = tmp_path_factory.mktemp("torchao") / "layers.safetensors"
    subprocess.run([sys.executable, str(SCRIPT), str(file)], env=os.environ | {"PYTHONPATH": str(FOLDER)}, check=True)
    return load_file(file)


def error(found: Tensor, expected: Tensor) -> float:
    """Root of the mean square, beside that of what is expected."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("mode", get_args(OnLoad))
def test_weights_and_products_are_those_of_torchao(reference: Parts, mode: OnLoad) -> None:
    parts = {name.removeprefix(f"{mode}."): part for name, part in reference.items() if name.startswith(f"{mode}.")}
    weight = READ[mode](parts)
    torch.testing.assert_close(weight.dequantize(), parts["meant"], rtol=1e-6, atol=1e-6)
    product = linear(reference["x"], pack(weight, reference["bias"]))
    assert error(product, parts["product"]) < MOST.get(mode, 1e-5)
    ours = QUANTIZE[mode](reference["weight"])
    assert isinstance(ours, type(weight))
    assert error(ours.dequantize(), reference["weight"]) < 1.02 * error(parts["meant"], reference["weight"])
