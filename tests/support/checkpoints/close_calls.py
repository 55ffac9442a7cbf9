"""Tokens that two engines may choose differently: those that numerical noise decides."""

from collections.abc import Mapping

import torch

TOLERANCE = 1e-4
LIKELIEST = 5


def assert_close_call(index: int, got: int, reference: torch.Tensor, own: Mapping[int, float]) -> None:
    """A token may differ from the reference's only where that one hardly decides, and both see the same there.

    Args:
        index: of the token, for the message.
        reference: logits [vocabulary] after the tokens before it.
        own: log-probabilities of the likeliest tokens after the same ones, by this engine.
    """
    best = reference.topk(2)
    gap = float(best.values[0] - best.values[1])
    assert gap < TOLERANCE, f"token {index} is {got}, not {int(best.indices[0])}; the reference's gap is {gap}"
    behind = float(best.values[0] - reference[got])
    assert behind < TOLERANCE, f"token {index} is {got}, which the reference has {behind} behind its best"
    scores = torch.log_softmax(reference.double(), -1)[list(own)]
    torch.testing.assert_close(
        torch.tensor(list(own.values()), dtype=torch.float64), scores, atol=TOLERANCE, rtol=TOLERANCE
    )
