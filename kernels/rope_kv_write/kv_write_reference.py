"""The definition of `kv_write` in plain torch."""

from torch import Tensor


def kv_write_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: Tensor) -> None:
    """As `kv_write`."""
    for source, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, source.shape[-1])[rows] = source.flatten(0, 1)
