"""Weights as the compressed-tensors library itself stores them."""

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor

from troupellm.tests.support.quantized.quantized_llama import signal_to_error

INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, float]] = {
    # name: format, weights, inputs, fewest decibels of signal to error
    "int8_channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, INT8_INPUTS, 38),
    "int8_static": (
        "int-quantized", {"num_bits": 8, "strategy": "channel"},
        INT8_INPUTS | {"strategy": "tensor", "dynamic": False}, 38,
    ),
    "int8_tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, INT8_INPUTS, 33),
    "int8_weight_only": ("naive-quantized", {"num_bits": 8, "strategy": "channel"}, None, 38),
    "int8_asymmetric": ("naive-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, None, 38),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, FP8_INPUTS, 28),
    "fp8_channel": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"},
        FP8_INPUTS | {"strategy": "token", "dynamic": True}, 28,
    ),
    "fp8_weight_only": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None, 28),
    "fp8_block": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
        FP8_INPUTS | {"strategy": "token", "dynamic": True}, 28,
    ),
    "w4a16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None, 17),
    "w4a16_asymmetric": (
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, None, 18,
    ),
    "w4a16_channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, None, 13),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32}, None, 40),
    "w8a16_asymmetric": (
        "pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, None, 38,
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4} | MX, None, 14),
    "mxfp6": ("mxfp6-pack-quantized", {"num_bits": 6} | MX, None, 24),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8} | MX, None, 26),
}  # fmt: skip


def scales_of(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points by each part's smallest and largest number."""
    rows, columns = weight.shape
    if args.strategy == "block":
        tall, wide = args.block_structure
        parts = weight.view(rows // tall, tall, columns // wide, wide).permute(0, 2, 1, 3).flatten(2)
    elif args.strategy == "group":
        parts = weight.view(rows, -1, args.group_size)
    else:
        parts = weight[:, None] if args.strategy == "channel" else weight.view(1, 1, -1)
    if args.type == "float" and args.group_size == 32:
        largest = {4: 6.0, 6: 7.5, 8: 448.0}[args.num_bits]
        return torch.exp2(torch.ceil(torch.log2(parts.abs().amax(dim=-1) / largest))), None
    if args.type == "float":
        scale = parts.abs().amax(dim=-1) / 448
    elif args.symmetric:
        scale = parts.abs().amax(dim=-1) / (2 ** (args.num_bits - 1) - 1)
    else:
        low, high = parts.amin(dim=-1).clamp(max=0), parts.amax(dim=-1).clamp(min=0)
        scale = (high - low) / (2**args.num_bits - 1)
        return scale, (torch.round(-low / scale) - 2 ** (args.num_bits - 1)).to(torch.int8)
    return (scale.view(1) if args.strategy == "tensor" else scale), None


class Writer:
    """Stores weights by the library's own compressor, and reads them back by it."""

    def __init__(self, name: str) -> None:
        form, weights, inputs, self.fewest = SCHEMES[name]
        self.weights = QuantizationArgs(**weights)
        inputs_args = None if inputs is None else QuantizationArgs(**inputs)
        self.scheme = QuantizationScheme(targets=["Linear"], weights=self.weights, input_activations=inputs_args)
        self.compressor = BaseCompressor.get_value_from_registry(form)
        self.static = inputs is not None and not inputs["dynamic"]
        as_json = [None if args is None else args.model_dump(mode="json") for args in (self.weights, inputs_args)]
        self.config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": as_json[0],
                    "input_activations": as_json[1],
                    "output_activations": None,
                }
            },
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }

    def __call__(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale, zero = scales_of(weight, self.weights)
        state = {"weight": weight, "weight_scale": scale}
        if zero is not None:
            state["weight_zero_point"] = zero
        stored = self.compressor.compress(state, self.scheme)
        meant = self.compressor.decompress({key: tensor.clone() for key, tensor in stored.items()}, self.scheme)
        if self.static:
            stored["input_scale"] = torch.tensor([0.03])
        assert signal_to_error(weight, meant["weight"].float()) > self.fewest
        return stored, meant["weight"].float()
