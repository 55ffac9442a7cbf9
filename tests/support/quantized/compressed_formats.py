"""Weights as the compressed-tensors library itself stores them."""

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor

from troupellm.tests.support.quantized.quantized_llama import signal_to_error

INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
FP4_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
         "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}  # fmt: skip
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
    "w2a16": ("pack-quantized", {"num_bits": 2, "strategy": "group", "group_size": 32}, None, 2),
    "w3a16_asymmetric": (
        "pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False}, None, 11,
    ),
    "w6a16": ("pack-quantized", {"num_bits": 6, "strategy": "channel"}, None, 25),
    "w4_in_bytes": ("naive-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None, 17),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, None, 18),
    "nvfp4_inputs": ("nvfp4-pack-quantized", NVFP4, FP4_INPUTS, 18),
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
    elif args.strategy in ("group", "tensor_group"):
        parts = weight.view(rows, -1, args.group_size)
    else:
        parts = weight[:, None] if args.strategy == "channel" else weight.view(1, 1, -1)
    if args.strategy == "tensor_group":
        return (parts.abs().amax(dim=-1) / 6 * global_scale(weight)).to(torch.float8_e4m3fn).float(), None
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


def global_scale(weight: Tensor) -> Tensor:
    """Of NVFP4: it stretches the scales of groups over the whole range of e4m3."""
    return 448 * 6 / weight.abs().max().reshape(1)


class Writer:
    """Stores weights by the library's own compressor, and reads them back by it."""

    def __init__(self, name: str) -> None:
        form, weights, inputs, self.fewest = SCHEMES[name]
        self.weights = QuantizationArgs(**weights)
        inputs_args = None if inputs is None else QuantizationArgs(**inputs)
        self.scheme = QuantizationScheme(targets=["Linear"], weights=self.weights, input_activations=inputs_args)
        self.compressor = BaseCompressor.get_value_from_registry(form)
        self.static = inputs is not None and inputs["dynamic"] in (False, "local")
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
        if self.weights.strategy == "tensor_group":
            state["weight_global_scale"] = global_scale(weight)
        stored = self.compressor.compress(state, self.scheme)
        meant = self.meaning(stored, weight.shape).float()
        if self.static:
            name = "input_global_scale" if self.weights.strategy == "tensor_group" else "input_scale"
            stored[name] = torch.tensor([0.03])
        assert signal_to_error(weight, meant) > self.fewest
        return stored, meant

    def meaning(self, stored: dict[str, Tensor], shape: torch.Size) -> Tensor:
        if self.weights.strategy != "tensor_group":
            copies = {key: tensor.clone() for key, tensor in stored.items()}
            return self.compressor.decompress(copies, self.scheme)["weight"]
        codes = unpack_fp4_from_uint8(stored["weight_packed"], *shape, dtype=torch.float32)  # which rounds to bfloat16
        scale, whole = stored["weight_scale"].float(), stored["weight_global_scale"]
        return dequantize(codes, scale, args=self.weights, dtype=torch.float32, global_scale=whole)
