"""Products through oneDNN with weights reordered once.

Two to six times as fast as `torch.nn.functional.linear` for 1 to 512 rows on AMD processors, where the default library
keeps to its slow path. The operators are private to torch, so they are probed once and the default is used where they
are missing or answer wrongly.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from troupellm.kernels.common.huge_pages import prefer_huge_pages

FEWEST_ROWS = 4
"""One or two rows take longer than four: oneDNN does not use its blocked kernels for them."""
_SIZES_PER_DOUBLING = 8


def onednn_pack(weight: Tensor) -> Tensor:
    """The weight [out, in] in oneDNN's own blocked layout (an opaque tensor)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    if packed.is_mkldnn:
        prefer_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def padded_rows(rows: int) -> int:
    """The number of rows, at least as many, that a product is computed with: eight sizes between powers of two.

    oneDNN makes a kernel for every number of rows that it meets, which takes milliseconds and some half a mebibyte that
    it never gives back: over the 2,048 sizes of a step that is a gibibyte. These are some sixty.
    """
    step = max(FEWEST_ROWS, (1 << (rows - 1).bit_length()) // (2 * _SIZES_PER_DOUBLING))
    return -(-rows // step) * step


def onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[rows, in] times a packed weight: [rows, out]."""
    rows = x.shape[0]
    missing = padded_rows(rows) - rows
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product[:rows]


def onednn_supports(device: torch.device, dtype: torch.dtype) -> bool:
    """True if weights of this device and type should take the path of this file."""
    return device.type == "cpu" and dtype == torch.float32 and _works()


@functools.cache
def _works() -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 33, generator=generator, dtype=torch.float32)
    weight = torch.randn(17, 33, generator=generator, dtype=torch.float32)
    bias = torch.randn(17, generator=generator, dtype=torch.float32)
    try:
        product = onednn_linear(x, onednn_pack(weight), bias)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.allclose(product, functional.linear(x, weight, bias), atol=1e-4)
