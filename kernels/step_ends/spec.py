"""What the ends of a decode step are given and give."""

from typing import NamedTuple

from torch import Tensor

from troupellm.kernels.sampling.truncate import Nucleus


class Beginning(NamedTuple):
    """What the layers of a step read, of rows that have as many tokens each, one row behind the other."""

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
    """int32 [groups, rows, width], the rows' block tables; undefined behind what their keys need."""
    kv_rows: Tensor
    """int64 [groups, tokens * kv_heads], see `kernels.kv_write`."""


class Draws(NamedTuple):
    """How tokens are drawn."""

    scales: Tensor
    """float32 [rows, 2], contiguous: one over the temperature, 0 where the likeliest token is taken; log of min_p."""
    streams: Tensor
    """int64 [rows], `noise.stream_key` of each row."""
    codes: Tensor
    """int32 [vocab], `noise.token_codes`."""
    nucleus: Nucleus | None = None
    """What top_k and top_p keep; None is all."""
