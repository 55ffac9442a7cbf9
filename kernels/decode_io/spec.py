"""Arguments and results of the first and the last operations of a decode step."""

from typing import NamedTuple

from torch import Tensor

from troupellm.kernels.sampling.truncate import Nucleus


class Beginning(NamedTuple):
    """The inputs of a step's layers, for rows that have the same number of tokens, row after row."""

    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]."""
    angles: Tensor | None
    """[tokens, width], rows of the angle table."""
    starts: Tensor
    """int32 [rows + 1], each row's first token, and the one past the last."""
    context_lens: Tensor
    """int32 [rows], keys of each row."""
    tables: Tensor
    """int32 [groups, rows, width], the rows' block tables; undefined beyond the blocks of their keys."""
    kv_rows: Tensor
    """int64 [groups, tokens * kv_heads], see `kernels.kv_write`."""


class Draws(NamedTuple):
    """The options by which tokens are drawn."""

    scales: Tensor
    """float32 [rows, 2], contiguous: one over the temperature, 0 where the likeliest token is taken; log of min_p."""
    streams: Tensor
    """int64 [rows], `noise.stream_key` of each row."""
    codes: Tensor
    """int32 [vocab], `noise.token_codes`."""
    nucleus: Nucleus | None = None
    """The limits of top_k and top_p; None keeps all tokens."""
