"""Layers as bitsandbytes stores them, and the weights that it reads from them: tensors in a file.

    PYTHONPATH=FOLDER_OF_BITSANDBYTES python bitsandbytes_reference.py FILE

A process of its own: transformers imports bitsandbytes wherever it finds it.
"""

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPES = ((96, 256), (40, 96))
"""Blocks of the second go on in the next row, which the package's compiled code for CPUs reads wrongly; its definition
in torch does not."""


def four_bits(weight: Tensor, kind: str, *, nested: bool) -> dict[str, Tensor]:
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_blockwise
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type=kind, compress_statistics=nested)
    layer.load_state_dict({"weight": weight})
    layer.to("cpu")  # which quantizes
    state, largest = layer.weight.quant_state, layer.weight.quant_state.absmax
    if nested:
        largest = dequantize_blockwise(largest, state.state2) + state.offset
    codes = layer.weight.data.reshape(-1)
    meant = _dequantize_4bit_compute(codes, largest, state.code, state.blocksize, weight.shape, torch.float32)
    return {**layer.state_dict(), "meant": meant}


def eight_bits(weight: Tensor) -> dict[str, Tensor]:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    codes, largest, _ = int8_vectorwise_quant(weight.half())
    return {"weight": codes, "SCB": largest, "meant": int8_vectorwise_dequant(codes, largest)}


def main(file: str) -> None:
    generator, found = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns, generator=generator)
        layers = {"int8": eight_bits(weight)}
        for kind in ("nf4", "fp4"):
            layers |= {f"{kind}_{nested}": four_bits(weight, kind, nested=nested) for nested in (False, True)}
        for name, tensors in layers.items():
            found |= {f"{name}_{columns}.{key}": tensor.clone().contiguous() for key, tensor in tensors.items()}
    save_file(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
