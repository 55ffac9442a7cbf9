"""Drawing tokens from logits, for all rows of a step at once.

All results depend only on a row's own logits and keys: neighbours, their number and their options do not matter.
"""

import torch
from torch import Tensor

from troupellm.kernels.common.triton import by_kernels
from troupellm.kernels.sampling import cpu
from troupellm.kernels.sampling.noise import log_exponential
from troupellm.kernels.sampling.search import row_argmax
from troupellm.kernels.sampling.truncate import Nucleus, draw_from_prefix, thresholds

WIDEST_PREFIX = 2048
"""Rows that a shorter prefix of largest logits does not decide look at this many before they are sorted."""
_CHUNK_ELEMENTS = 1 << 20
"""Logits of a row that are drawn from at a time, which keeps the noise in the cache and bounds its memory."""


def draw(scaled: Tensor, keys: Tensor, codes: Tensor) -> Tensor:
    """One token per row from softmax(scaled), int64 [rows].

    Args:
        scaled: float32 [rows, vocab], processed logits over temperature; -inf is never drawn.
        keys: `noise.position_keys`, int32 [rows, 2].
        codes: `noise.token_codes`, int32 [vocab].
    """
    if by_kernels(scaled.device):
        from troupellm.kernels.sampling.triton_draw import best_triton

        return best_triton(scaled, keys, codes)[0]
    functions = cpu.compiled() if scaled.device.type == "cpu" and scaled.stride(1) == 1 else None
    if functions is not None:
        return functions.draw(scaled, keys.contiguous(), codes)
    step = max(1, _CHUNK_ELEMENTS // scaled.shape[1])
    if scaled.shape[0] <= step:
        return row_argmax(scaled - log_exponential(codes, keys))
    parts = zip(torch.split(scaled, step), torch.split(keys, step), strict=True)
    return torch.cat([row_argmax(part - log_exponential(codes, key)) for part, key in parts])


def draw_truncated(scaled: Tensor, nucleus: Nucleus, keys: Tensor, codes: Tensor, prefix: int) -> Tensor:
    """One token per row, drawn from the tokens of softmax(scaled) that top_k and top_p keep, int64 [rows]. The token of
    a row without a finite largest logit is arbitrary.

    On a GPU kernels find the kept tokens by pivots, and ignore the prefix. Without kernels this waits for the device,
    to learn if a row needs more than its `prefix` largest logits.

    Args:
        scaled: float32 [rows, vocab] with the largest of each row at 0.
        nucleus: limits of top_k and top_p.
        keys, codes: as `draw`.
        prefix: how many of the largest logits to look at before all of them; 0 looks at all at once. Must follow from
            the row's own parameters, so that a row is computed alike in any batch.
    """
    if by_kernels(scaled.device):
        from troupellm.kernels.sampling.triton_truncate import truncated_triton

        return truncated_triton(scaled, nucleus.top_k.flatten(), nucleus.top_p.flatten(), codes, keys=keys)[0]
    if not 0 < prefix < scaled.shape[1]:
        return draw(scaled.masked_fill(scaled < thresholds(scaled, nucleus), -torch.inf), keys, codes)
    tokens, decided = draw_from_prefix(scaled, nucleus, keys, codes, prefix)
    rest = (~decided).nonzero().squeeze(1)
    if rest.numel():
        wider = WIDEST_PREFIX if prefix < WIDEST_PREFIX else 0
        tokens[rest] = draw_truncated(scaled[rest], nucleus.take(rest), keys[rest], codes, wider)
    return tokens
