"""Draws drafts with the noise that the model will draw with.

A token is argmax(processed logits / temperature + Gumbel noise), whose noise is a pure function of (seed, fork,
position, token). The same noise on other logits draws from other probabilities, and yet gives the same token as often
as the two agree: at least (1 - d) / (1 + d) of the time at a total variation distance d (Daliri, Musco and Suresh,
"Coupling without communication and drafter-invariant speculative decoding", 2024). Since a draft is kept only if it
equals the model's own token, the probabilities that it was drawn with need not be known.
"""

import torch
from torch import Tensor

from troupellm.kernels.sampling import draw
from troupellm.kernels.sampling.noise import position_keys
from troupellm.kernels.sampling.search import row_argmax
from troupellm.models.proposers.base import RowDraws


def draw_coupled(logits: Tensor, draws: RowDraws, positions: Tensor, codes: Tensor) -> Tensor:
    """One token per row, int64 [rows].

    Args:
        logits: float32 [rows, vocab] of the proposer; not changed.
        draws: of the same rows.
        positions: int64 [rows] where the tokens would stand.
        codes: `kernels.sampling.noise.token_codes` of the vocabulary.
    """
    tokens = torch.as_tensor(row_argmax(logits))
    if draws.greedy:
        return tokens
    if logits.device.type != "cpu":  # which rows draw is not known here without a wait for the device
        warm = draws.inverse_temperature[:, None]
        scaled = (logits - logits.amax(-1, keepdim=True)).mul_(warm)
        drawn = draw(scaled, position_keys(draws.streams, positions), codes)
        return torch.where(draws.inverse_temperature > 0, drawn, tokens)
    random = draws.inverse_temperature.nonzero().squeeze(1)
    if random.numel():
        part = logits[random]
        # With its peak at 0 a row cannot overflow, however low the temperature.
        scaled = (part - part.amax(-1, keepdim=True)).mul_(draws.inverse_temperature[random, None])
        tokens[random] = draw(scaled, position_keys(draws.streams[random], positions[random]), codes)
    return tokens
