"""The definitions of `silu_mul` and `gelu_mul` in plain torch."""

import math

import torch
from torch import Tensor

CUBE = 0.044715


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """As `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate.float()).to(gate.dtype) * up


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    """As `gelu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    bent = (math.sqrt(2 / math.pi) * (wide + CUBE * wide.pow(3))).tanh()
    return (wide / 2 * (1 + bent)).to(gate.dtype) * up
