"""The compiled path of paged attention; see `kernels.native`."""

import functools

import torch
from torch import Tensor

from troupellm.kernels import native
from troupellm.kernels.paged_attention.reference import paged_attention_reference

LANES = 16
MAX_HEAD_DIM = 256


def supports(query: Tensor) -> bool:
    """Whether the compiled path takes these heads: float32 on a CPU, head_dim a multiple of 16 up to 256."""
    size = query.shape[-1]
    return query.device.type == "cpu" and query.dtype == torch.float32 and size % LANES == 0 and size <= MAX_HEAD_DIM


def run(
    function: native.Function, query: Tensor, caches: tuple[Tensor, Tensor], plan: tuple[Tensor, Tensor], scale: float,
    out: Tensor, *, softcap: float = 0.0, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute the items of a plan.

    Args:
        query: [tokens, heads, head_dim], heads contiguous.
        caches: keys and values [blocks, kv_heads, block_size, head_dim].
        plan: block tables int32 [rows, width] and items int32 [items, 4] (token, row, first key, key past the last).
        out: [tokens, heads, head_dim], heads contiguous; the rows of the items are written.
        sinks: float32 [heads], contiguous.
    """
    tables, items = plan
    _, kv_heads, block_size, head_dim = caches[0].shape
    function(
        query.data_ptr(), query.stride(0), caches[0].data_ptr(), caches[1].data_ptr(), tables.data_ptr(),
        tables.stride(0), items.data_ptr(), items.shape[0], query.shape[1], kv_heads, block_size, head_dim, scale,
        softcap, None if sinks is None else sinks.data_ptr(), out.data_ptr(), out.stride(0), torch.get_num_threads(),
    )  # fmt: skip


@functools.cache
def load() -> native.Function | None:
    """The compiled function, or None where it is not there or does not equal the reference."""
    library = native.load()
    if library is None:
        return None
    function = library.function("paged_attention", "pippp" + "ipiiiii" + "ddp" + "pii")
    return function if _agrees(function) else None


def _agrees(function: native.Function) -> bool:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 32, generator=generator)
    keys = torch.randn(5, 2, 7, 32, generator=generator)
    values = torch.randn(5, 2, 7, 32, generator=generator)
    sinks = torch.randn(6, generator=generator)
    tables = torch.tensor([[3, 1, 4], [0, 2, 0]], dtype=torch.int32)
    items = torch.tensor([[0, 0, 2, 20], [1, 1, 0, 9]], dtype=torch.int32)
    for softcap, given in ((0.0, None), (0.7, sinks)):
        out = torch.empty_like(query)
        run(function, query, (keys, values), (tables, items), 0.2, out, softcap=softcap, sinks=given)
        expected = paged_attention_reference(
            query, keys, values, tables, items, scale=0.2, softcap=softcap, sinks=given
        )  # fmt: skip
        if not torch.allclose(out, expected, atol=1e-5):
            return False
    return True
