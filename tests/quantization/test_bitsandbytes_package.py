"""Weights that bitsandbytes itself stored mean to us what they mean to it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from troupellm.kernels.quantized_linear import QuantizedWeight
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.tests.support.environment.absence import absent

pytestmark = pytest.mark.slow

FOLDER = Path(sys.prefix) / "bitsandbytes"
SCRIPT = Path(__file__).parents[1] / "support" / "quantized" / "bitsandbytes_reference.py"
KINDS = ("nf4_False", "nf4_True", "fp4_False", "fp4_True", "int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not FOLDER.is_dir():
        absent("bitsandbytes", "`make bitsandbytes` installs it")
    folder = tmp_path_factory.mktemp("bitsandbytes")
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    subprocess.run([sys.executable, str(SCRIPT), str(folder / "model.safetensors")], env=environment, check=True)
    return folder


@pytest.mark.parametrize("columns", [256, 96])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_package(folder: Path, kind: str, columns: int) -> None:
    layer = f"{kind}_{columns}"
    meant = load_file(folder / "model.safetensors")[f"{layer}.meant"]
    form = read_format(ConfigReader({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}))
    assert form is not None
    stored = QuantizedCheckpoint(folder, torch.float32, lambda _: None, form)
    weight = stored.linear(layer, (meant.shape[0], columns))
    assert isinstance(weight, QuantizedWeight)
    rounding = 2e-7 if kind == "int8" else 0.0  # the scale is divided by 127 first
    torch.testing.assert_close(weight.dequantize(), meant, rtol=rounding, atol=0.0)
