"""Products whose rows do not depend on how many others there are: always of the same shape."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

TILE_ROWS = 16


def in_fixed_tiles(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a product on 16 rows at a time, the last ones filled up with zeros.

    Libraries choose their loops, and with them the order of every sum, by the number of rows. With one number there is
    one order; where among the 16 a row stands does not matter to any of them.

    Args:
        x: [rows, in].
        product: [16, in] to [16, out].
    """
    missing = -x.shape[0] % TILE_ROWS
    padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
    tiles = [product(tile.contiguous()) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(tiles)[: x.shape[0]]
