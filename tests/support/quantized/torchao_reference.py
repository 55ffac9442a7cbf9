"""The results of torchao for one layer, in each kind that it computes on a CPU: tensors in a file.

    PYTHONPATH=FOLDER_OF_TORCHAO python torchao_reference.py FILE

A process of its own: transformers imports torchao wherever it finds it, which slows down every other test.
"""

import sys
import warnings

import torch
from safetensors.torch import save_file
from torch import Tensor

ROWS, OUTPUTS, INPUTS = 7, 96, 256
GROUP = 128
"""As we quantize to four bits where it divides the inputs."""


def quantized(layer: torch.nn.Linear, x: Tensor, config: object) -> dict[str, Tensor]:
    """The layer's new weight in its parts, what it stands for, and its product with `x`."""
    from torchao.quantization import quantize_

    quantize_(layer, config)
    weight = layer.weight
    found = {"codes": weight.qdata, "scale": weight.scale, "meant": weight.dequantize(), "product": layer(x)}
    if getattr(weight, "zero_point", None) is not None:
        found["zero"] = weight.zero_point
    return found


@torch.no_grad()
def main(file: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import (
            Float8WeightOnlyConfig,
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            MappingType,
            PerGroup,
        )

    configs = {
        "int8": Int8DynamicActivationInt8WeightConfig(),
        "int8-weight-only": Int8WeightOnlyConfig(),
        "int4": IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(GROUP), mapping_type=MappingType.ASYMMETRIC
        ),
        "fp8": Float8WeightOnlyConfig(),
    }
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator)
    bias, x = torch.randn(OUTPUTS, generator=generator), torch.randn(ROWS, INPUTS, generator=generator)
    found = {"weight": weight, "bias": bias, "x": x}
    for name, config in configs.items():
        layer = torch.nn.Linear(INPUTS, OUTPUTS)
        layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
        found |= {f"{name}.{key}": part.contiguous() for key, part in quantized(layer, x, config).items()}
    save_file(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
