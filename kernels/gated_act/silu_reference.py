"""The definition of `silu_mul` in plain torch."""

import torch
from torch import Tensor


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """As `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate.float()).to(gate.dtype) * up
