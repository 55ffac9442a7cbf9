"""top_k and top_p, mostly without a sort.

Both keep the tokens whose logit reaches a threshold, and tokens of equal logit stand or fall together, so the kept set
is a pure function of the row's logits. The largest few logits decide nearly every row; only rows that they do not
decide are sorted. Which way a row goes depends on its own parameters and logits, never on its neighbours.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.sampling.noise import log_exponential
from troupellm.kernels.sampling.search import top_values


class Nucleus(NamedTuple):
    """The limits of the tokens to keep, per row."""

    top_k: Tensor
    """int64 [rows, 1]; at least the vocabulary's width keeps all."""
    top_p: Tensor
    """float64 [rows, 1]; 1 keeps all. Counts the probability left after top_k."""

    def take(self, index: Tensor) -> "Nucleus":
        return Nucleus(self.top_k[index], self.top_p[index])


def draw_from_prefix(
    scaled: Tensor, nucleus: Nucleus, keys: Tensor, codes: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Draw from the kept tokens among each row's `width` largest.

    Args: as `draw_truncated`.

    Returns:
        Tokens int64 [rows], and bool [rows]: False where the kept set may reach beyond the prefix, so the token there
        means nothing.
    """
    vocab = scaled.shape[1]
    values, ids = top_values(scaled, width)
    threshold = values.masked_fill(~_kept(scaled, values, nucleus), torch.inf).amin(1)
    kept = values >= threshold[:, None]  # equals of the last one, too
    reaches_k = (nucleus.top_k < width) | (nucleus.top_k >= vocab)
    decided = (values[:, -1] < threshold) & reaches_k.squeeze(1)
    scores = torch.where(kept, values - log_exponential(codes[ids], keys), -torch.inf)
    best = scores.amax(1, keepdim=True)
    return torch.where(scores == best, ids, vocab).amin(1), decided


def thresholds(scaled: Tensor, nucleus: Nucleus) -> Tensor:
    """The least logit that is kept, float32 [rows, 1]; sorts the rows, except on a GPU, where pivots find it."""
    if by_kernels(scaled.device):
        from troupellm.kernels.sampling.triton_truncate import truncated_triton

        return truncated_triton(scaled, nucleus.top_k.flatten(), nucleus.top_p.flatten())[1][:, None]
    values = _sorted(scaled)
    return values.masked_fill(~_kept(scaled, values, nucleus), torch.inf).amin(1, keepdim=True)


def _kept(scaled: Tensor, values: Tensor, nucleus: Nucleus) -> Tensor:
    """True for the values that stay, of a row's largest ones [rows, n] (falling, with the largest of all at 0)."""
    unlimited = nucleus.top_k >= scaled.shape[1]
    cut = values.gather(1, nucleus.top_k.clamp(max=values.shape[1]) - 1)
    kept = ((values >= cut) | unlimited) & (values > -torch.inf)
    # Sums in float64 keep the borderline token out of reach of rounding, for any shape of the sum.
    weights = values.exp().mul_(kept)
    running = weights.cumsum(1, dtype=torch.float64)
    total = torch.where(unlimited, scaled.exp().sum(1, keepdim=True, dtype=torch.float64), running[:, -1:])
    return kept & ((running - weights < nucleus.top_p * total) | (nucleus.top_p >= 1))


def _sorted(values: Tensor) -> Tensor:
    """Each row in falling order. numpy's sort is several times faster than torch's on CPUs with wide vectors."""
    if values.device.type != "cpu":
        return values.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(values.neg().numpy(), axis=-1)).neg_()
