"""Weights in eight-bit floats with a scale for each tile, written as DeepSeek's checkpoints have them."""

import torch
from torch import Tensor

E4M3, LARGEST = torch.float8_e4m3fn, 448.0


def blocks(weight: Tensor, block: tuple[int, int], *, powers: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    """A scale for every tile, the last ones smaller than a block: what is stored, and what it means.

    Args:
        powers: scales are powers of two, stored as their exponents.
    """
    tall, wide = block
    rows, columns = -(-weight.shape[0] // tall), -(-weight.shape[1] // wide)
    scale, values, meant = torch.empty(rows, columns), torch.empty_like(weight).to(E4M3), torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            place = slice(row * tall, row * tall + tall), slice(column * wide, column * wide + wide)
            size = weight[place].abs().max() / LARGEST
            scale[row, column] = torch.exp2(torch.ceil(torch.log2(size))) if powers else size
            values[place] = (weight[place] / scale[row, column]).to(E4M3)
            meant[place] = values[place].float() * scale[row, column]
    kept = (torch.log2(scale) + 127).to(torch.uint8) if powers else scale
    return {"weight": values, "weight_scale_inv": kept}, meant
