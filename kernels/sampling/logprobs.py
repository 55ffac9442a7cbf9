"""Log-probabilities of chosen tokens and of the likeliest alternatives."""

import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.sampling.search import top_values

FLOOR = -9999.0
"""The value reported for an impossible token, because JSON has no infinity."""


def token_logprobs(logprobs: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural logs of the probabilities of `chosen` tokens and of the `count` likeliest ones.

    Args:
        logprobs: float32 [rows, vocab], log-softmax of the logits as the model gave them.
        chosen: int64 [rows].
        count: at most the vocabulary's width is reported.

    Returns:
        token ids int32 [rows, 1 + count] and log-probabilities float32 [rows, 1 + count], the chosen one first and the
        others falling; ranks int32 [rows]: 1 + how many tokens are likelier than the chosen one. A row with NaN or
        infinite logits reports the floor and means nothing.
    """
    of_chosen = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > of_chosen).sum(1, dtype=torch.int32) + 1
    values, ids = of_chosen, chosen[:, None]
    count = min(count, logprobs.shape[1])
    if count:
        top, top_ids = top_values(logprobs, count)
        values, ids = torch.cat((values, top), 1), torch.cat((ids, top_ids), 1)
    return ids.to(torch.int32), floored(values), ranks


def listed_logprobs(scores: Tensor, chosen: Tensor, listed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for given tokens instead of the likeliest; sorts the rows.

    Args:
        scores: float32 [rows, vocab].
        chosen: int64 [rows].
        listed: int64 [n], valid ids, the same for all rows.

    Returns:
        token ids int32 [rows, 1 + n] and scores float32 [rows, 1 + n], the chosen one first and the others as listed;
        ranks of the chosen int32 [rows], and of the others int32 [rows, n].
    """
    ids = torch.cat((chosen[:, None], listed.expand(chosen.shape[0], -1)), 1)
    values = scores.gather(1, ids)
    rising = scores.sort(-1).values
    ranks = scores.shape[1] + 1 - torch.searchsorted(rising, values, right=True)
    return ids.to(torch.int32), floored(values), ranks[:, 0].to(torch.int32), ranks[:, 1:].to(torch.int32).contiguous()


def floored(values: Tensor) -> Tensor:
    """Log-probabilities as they are reported: none below the floor, which also replaces NaN."""
    return values.nan_to_num(FLOOR, FLOOR, FLOOR).clamp_(min=FLOOR)


def chosen_logprobs(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of chosen tokens alone, without a log-softmax of all.

    Args:
        logits: float32 [rows, vocab].
        chosen: int64 [rows].

    Returns:
        float32 [rows], NaN for rows with NaN, and ranks int32 [rows].
    """
    if by_kernels(logits.device) and logits.stride(1) == 1:
        from troupellm.kernels.sampling.triton_adjust import chosen_logprobs_triton

        return chosen_logprobs_triton(logits, chosen)
    own = logits.gather(1, chosen[:, None])
    return (own - logits.logsumexp(1, keepdim=True)).squeeze(1), (logits > own).sum(1, dtype=torch.int32) + 1
