"""Gives the tokens that a step has drawn to the guides of its rows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from troupellm.models.batch.row_table import RowTable
from troupellm.models.sampling.masks import Advanced
from troupellm.models.sampling.sampler import Sampled
from troupellm.models.structured_outputs.guided_rows import GuidedRows


def report_tokens(
    guides: GuidedRows, table: RowTable, rows: Sequence[int], slots: NDArray[np.int64], sampled: Sampled
) -> Advanced:
    """Move guides on by one token of each row. The rows have the tokens that follow from it, then."""
    tokens = [[token] * (token >= 0) for token in sampled.values]
    advanced = guides.advance(rows, tokens, table.room(slots))
    for row, forced in advanced.forced.items():
        table.append_known(row, forced)
    return advanced
