"""Log-probabilities of a step's rows, sent to the host among the step's numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from troupellm.kernels.sampling.logprobs import chosen_logprobs, floored, token_logprobs
from troupellm.models.gpu.host_transfer import Ints, Staging
from troupellm.models.sampling.logprobs import SampledLogprobs
from troupellm.protocol.messages.worker import SamplingState

NOTHING = -1


class Group(NamedTuple):
    """Rows that get the same number of log-probabilities."""

    likeliest: int
    """Number of the likeliest tokens, beside the chosen one."""
    members: tuple[int, ...]
    """Indices of the rows within the step."""


def num_logprobs(state: SamplingState) -> int | None:
    """The number of likeliest tokens that a row gets with each of its own; `NOTHING`; None: the step's numbers do not
    contain all that it asks for."""
    if state.logprobs < 0:
        return NOTHING
    return state.logprobs if state.logprobs_mode == "raw_logprobs" and not state.logprob_token_ids else None


def groups_of(counts: Ints) -> tuple[Group, ...]:
    """counts: [rows], as of `num_logprobs`."""
    wanted = sorted(set(counts[counts != NOTHING].tolist()))
    return tuple(Group(count, tuple(np.flatnonzero(counts == count).tolist())) for count in wanted)


def pack(groups: Sequence[Group], logits: Tensor, tokens: Tensor, staging: Staging) -> list[Tensor]:
    """The log-probabilities of a step as numbers, each int64 [n].

    Args:
        logits: float32 [rows, vocab], as the model gave them.
        tokens: int64 [rows]; below 0 where there is none.
    """
    parts, tokens = [], tokens.clamp(min=0)
    for count, members in groups:
        if not count:
            parts.append(pairs(logits, tokens))
            continue
        rows, chosen = logits, tokens
        if len(members) < logits.shape[0]:
            (index,) = staging.send(np.array(members))
            rows, chosen = logits.index_select(0, index), tokens.index_select(0, index)
        ids, values, ranks = token_logprobs(rows.log_softmax(-1), chosen, count)
        flat = torch.cat((ids, values.view(torch.int32), ranks[:, None]), 1).view(-1)
        parts.append(torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(torch.int64))
    return parts


def pairs(logits: Tensor, tokens: Tensor) -> Tensor:
    """int64 [rows]: in its lower half a token's log-probability as bits of a float32, in its upper half its rank."""
    values, ranks = chosen_logprobs(logits, tokens)
    return torch.stack((values.view(torch.int32), ranks), dim=1).view(torch.int64).view(-1)


def unpack(groups: Sequence[Group], numbers: Ints, tokens: Tensor, vocab: int) -> tuple[SampledLogprobs, ...]:
    """On the host.

    Args:
        numbers: [n], all that `pack` gave, one behind the other.
        tokens: int64 [rows].
        vocab: the logits' width.
    """
    parts, begin = [], 0
    for count, members in groups:
        index = list(members)
        if not count:
            end = begin + tokens.numel()
            halves = torch.from_numpy(numbers[begin:end]).view(torch.int32).view(-1, 2)[index]
            values = floored(halves[:, :1].contiguous().view(torch.float32))
            ids, ranks = tokens[index][:, None].to(torch.int32), halves[:, 1].contiguous()
        else:
            width = 1 + min(count, vocab)
            size = len(index) * (2 * width + 1)
            end = begin + -(-size // 2)
            table = torch.from_numpy(numbers[begin:end]).view(torch.int32)[:size].view(len(index), -1)
            ids, values = table[:, :width].contiguous(), table[:, width:-1].contiguous().view(torch.float32)
            ranks = table[:, -1].contiguous()
        parts.append(SampledLogprobs(members, ids, values, ranks))
        begin = end
    return tuple(parts)
