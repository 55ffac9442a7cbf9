"""Products whose rows do not depend on how many others there are: always of the same shape."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

TILE_ROWS = {"cpu": 16, "cuda": 64}
"""On a GPU as many as one instruction of Hopper's tensor cores takes (wgmma). A library then has a single row of tiles,
so a row's place cannot change the order of its sum. Up to 64 sequences read each weight once, as they do without; the
arithmetic, a third of what hides behind that reading, costs no time. 128 rows would halve what prompts read, but take
two rows of tiles and most of the time of the reading.

On a CPU, where arithmetic does not hide, as few as fill the vectors."""


def tile_rows(device: torch.device) -> int:
    """Rows of every product on a device."""
    return TILE_ROWS.get(device.type, TILE_ROWS["cpu"])


def whole_tiles(rows: int, device: torch.device) -> int:
    """The number of rows, at least `rows`, that nothing has to be filled up for."""
    size = tile_rows(device)
    return -(-rows // size) * size


def in_fixed_tiles(x: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a product on so many rows at a time, the last ones filled up with zeros.

    Libraries choose their loops, and with them the order of every sum, by the number of rows. With one number there is
    one order; where in a tile a row stands does not matter to any of them.

    Args:
        x: [rows, in].
        product: [`tile_rows`, in] to [`tile_rows`, out].
    """
    missing = whole_tiles(x.shape[0], x.device) - x.shape[0]
    padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
    tiles = [product(tile.contiguous()) for tile in torch.split(padded, tile_rows(x.device))]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[: x.shape[0]]
