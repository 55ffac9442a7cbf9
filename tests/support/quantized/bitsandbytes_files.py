"""Weights as bitsandbytes stores them, written number by number as its documentation has them."""

import json

import torch
from torch import Tensor

from troupellm.tests.support.quantized.quantized_llama import Stored, signal_to_error

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (
    0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25, -0.0, -0.005208333333, -0.66666667, -1.0,
    -0.33333333, -0.5, -0.16666667, -0.25,
)  # fmt: skip
TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor(FP4)}
BLOCK, NESTED_BLOCK = 64, 256
FEWEST = {"nf4": 17, "fp4": 15}


def four_bits(weight: Tensor, kind: str, *, nested: bool) -> Stored:
    """Blocks are of the flattened weight and go on in the next row. The first of a pair has the high bits."""
    flat, table = weight.flatten(), TABLES[kind]
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    state = {"quant_type": kind, "blocksize": BLOCK, "dtype": "float32", "shape": list(weight.shape)}
    stored, largest = eight_bits(blocks.abs().amax(dim=1), state) if nested else ({}, blocks.abs().amax(dim=1))
    codes = (blocks[..., None] / largest[:, None, None] - table).abs().argmin(dim=-1)
    meant = (table[codes] * largest[:, None]).flatten()[: len(flat)].view_as(weight)
    codes = codes.flatten()[: len(flat)].to(torch.uint8)
    assert signal_to_error(weight, meant) > FEWEST[kind]
    return {
        "weight": (codes[::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": largest,
        "weight.quant_map": table,
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    } | {f"weight.{key}": tensor for key, tensor in stored.items()}, meant


def eight_bits(largest: Tensor, state: dict[str, object]) -> Stored:
    """The scales of blocks, quantized in blocks of their own around their mean; what they mean."""
    offset, table = float(largest.mean()), torch.linspace(-1, 1, 256)
    padded = torch.nn.functional.pad(largest - offset, (0, -len(largest) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    whole = padded.abs().amax(dim=1)
    codes = (padded[..., None] / whole[:, None, None] - table).abs().argmin(dim=-1)
    meant = ((table[codes] * whole[:, None]).flatten() + offset)[: len(largest)]
    state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    codes = codes.flatten()[: len(largest)].to(torch.uint8)
    return {"absmax": codes, "nested_absmax": whole, "nested_quant_map": table}, meant


def int8(weight: Tensor) -> Stored:
    largest = weight.abs().amax(dim=1)
    codes = torch.round(weight * 127 / largest[:, None]).to(torch.int8)
    meant = (codes.double() * largest[:, None].double() / 127).float()
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, meant
