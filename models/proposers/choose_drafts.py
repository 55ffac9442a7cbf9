"""Chooses drafts by a drafter's scores: the likeliest tokens, or those that the model's own noise favours."""

import torch
from torch import Tensor

from troupellm.kernels.sampling.noise import log_exponential, position_keys, token_codes
from troupellm.kernels.sampling.search import row_argmax
from troupellm.models.proposers.base import RowDraws
from troupellm.models.proposers.coupled_draws import draw_coupled


class Guesser:
    """Picks tokens of one vocabulary."""

    def __init__(self, vocab: int, vocabulary: Tensor | None, *, coupled: bool, device: torch.device) -> None:
        """
        Args:
            vocab: tokens of the model.
            vocabulary: int64 [scores], which of them are scored; None is all, in order.
            coupled: drawn as the model draws, where it does; else the likeliest ones.
        """
        codes = token_codes(vocab, device)
        self._codes = codes if vocabulary is None else codes[vocabulary]
        self._vocabulary, self._coupled, self._vocab = vocabulary, coupled, vocab

    def one(self, scores: Tensor, draws: RowDraws, positions: Tensor) -> Tensor:
        """A token per row, int64 [rows] of the model's vocabulary.

        Args:
            scores: float32 [rows, scores].
            draws: of these rows.
            positions: int64 [rows] where the tokens would stand.
        """
        scores = scores[:, : self._vocab]
        if self._coupled:
            return self._named(draw_coupled(scores, draws, positions, self._codes[: scores.shape[1]]))
        return self._named(torch.as_tensor(row_argmax(scores)))

    def several(self, scores: Tensor, draws: RowDraws, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The best tokens per row, best first.

        Returns:
            tokens int64 [rows, count], and the logarithms of their shares, float32 [rows, count].
        """
        scores = scores[:, : self._vocab]
        shares = scores.log_softmax(-1)
        ranked = scores
        if self._coupled and not draws.greedy:
            warm = draws.inverse_temperature[:, None]
            noise = log_exponential(self._codes[: scores.shape[1]], position_keys(draws.streams, positions))
            ranked = torch.where(warm > 0, shares * warm - noise, scores)
            shares = torch.where(warm > 0, ranked.log_softmax(-1), shares)
        _, chosen = ranked.topk(count, dim=-1)
        return self._named(chosen), shares.gather(1, chosen)

    def _named(self, chosen: Tensor) -> Tensor:
        return chosen if self._vocabulary is None else self._vocabulary[chosen]
