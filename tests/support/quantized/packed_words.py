"""GPTQ and AWQ files, packed number by number as the formats are documented."""

from typing import Any

import numpy as np
import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from numpy.typing import NDArray
from torch import Tensor

from troupellm.tests.support.quantized.quantized_llama import signal_to_error

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "damp_percent": 0.01}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FEWEST = {2: 4, 3: 9, 4: 12, 5: 20, 6: 26, 7: 32, 8: 35}
"""Decibels of signal to error by bits."""
AWQ_PACKING = (0, 2, 4, 6, 1, 3, 5, 7)


def whole_numbers(
    weight: Tensor, groups: NDArray[np.int64], bits: int, symmetric: bool
) -> tuple[NDArray[np.uint32], NDArray[np.float16], NDArray[np.int64]]:
    """q [out, in], scales [groups, out] and zero points [groups, out]."""
    values, top = weight.numpy().astype(np.float64), 2**bits - 1
    count = int(groups.max()) + 1
    scales, zeros = np.zeros((count, values.shape[0])), np.zeros((count, values.shape[0]), dtype=np.int64)
    for group in range(count):
        part = values[:, groups == group]
        if symmetric:
            scales[group], zeros[group] = 2 * np.abs(part).max(axis=1) / top, 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[group] = (high - low) / top
            zeros[group] = np.clip(np.round(-low / scales[group]), 1, top)
    scales = scales.astype(np.float16)
    q = np.round(values / scales[groups].T.astype(np.float64)) + zeros[groups].T
    return np.clip(q, 0, top).astype(np.uint32), scales, zeros


def packed(numbers: NDArray[Any], bits: int) -> Tensor:
    """Along the last dimension, as one long little-endian number."""
    places = np.unpackbits(numbers.astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    octets = np.packbits(places.reshape(*numbers.shape[:-1], -1), axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(octets).view("<i4"))


class GptqWriter:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def settings(self, name: str) -> tuple[int, int] | None:
        """Bits and group size; None is not quantized."""
        if "dynamic" in self.config and name.endswith("o_proj"):
            return None
        changed = self.config | (
            {"bits": 8, "group_size": 64} if "dynamic" in self.config and name.endswith("down_proj") else {}
        )
        return changed["bits"], changed["group_size"]

    def __call__(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        settings = self.settings(name)
        if settings is None:
            return {"weight": weight}, weight
        bits, size = settings
        columns = weight.shape[1]
        groups = np.arange(columns) // (columns if size == -1 else size)
        if self.config["desc_act"]:
            groups = np.random.default_rng(columns).permutation(groups)
        q, scales, zeros = whole_numbers(weight, groups, bits, self.config["sym"])
        minus = 0 if self.config.get("checkpoint_format") == "gptq_v2" else 1
        stored = {
            "qweight": packed(np.ascontiguousarray(q), bits).t(),
            "qzeros": packed(zeros - minus, bits),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
            "bias": torch.zeros(weight.shape[0], dtype=torch.float16),
        }
        if self.config["group_size"] == -1:
            del stored["g_idx"]
        meant = np.empty(weight.shape, dtype=np.float32)
        for column in range(columns):
            group = groups[column]
            meant[:, column] = scales[group].astype(np.float32) * (q[:, column].astype(np.int64) - zeros[group])
        assert signal_to_error(weight, torch.from_numpy(meant)) > FEWEST[bits]
        return stored, torch.from_numpy(meant)


def awq_writer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The reference is the compressed-tensors library's own reading."""
    if name.endswith("v_proj"):
        return {"weight": weight}, weight
    groups = np.arange(weight.shape[1]) // 32
    q, scales, zeros = whole_numbers(weight, groups, 4, symmetric=False)
    zeros = np.minimum(zeros, 15)

    def in_order(numbers: NDArray[Any]) -> NDArray[Any]:
        return numbers.reshape(numbers.shape[0], -1, 8)[:, :, list(AWQ_PACKING)].reshape(numbers.shape)

    stored = {
        "qweight": packed(in_order(np.ascontiguousarray(q.T)), 4),
        "qzeros": packed(in_order(zeros), 4),
        "scales": torch.from_numpy(scales),
    }
    library = AutoAWQConverter(group_size=32)
    codes, scale, zero = library._convert_gemm_module(*(stored[key] for key in ("qweight", "scales", "qzeros")))
    assert zero is not None
    spread = [tensor.float().repeat_interleave(32, dim=1) for tensor in (scale, zero)]
    meant = (codes.float() - spread[1]) * spread[0]
    assert signal_to_error(weight, meant) > 12
    return stored, meant
