"""With which probability each token is drawn, worked out by itself in float64, and whether draws fit that."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEWEST = 5.0
"""Draws that a cell must be expected to have before Pearson's statistic is distributed as its name says."""


def next_token(logits: Floats, history: Ints, prompt: int, options: dict[str, Any]) -> Floats:
    """Probabilities [rows, vocab], in the order of vLLM's sampler.

    Args:
        logits: of the model [rows, vocab].
        history: [rows, tokens] that come before, those of the prompt first.
        prompt: how many these are.
        options: as of `SamplingState`; top_k and what masks tokens is not here.
    """
    logits, tokens = logits.copy(), np.arange(logits.shape[1])
    for token, value in options.get("logit_bias", ()):
        logits[:, token] += value
    every = (history[:, :, None] == tokens).sum(axis=1)
    own = (history[:, prompt:, None] == tokens).sum(axis=1)
    penalty = options.get("repetition_penalty", 1.0)
    logits = np.where(every > 0, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits -= options.get("frequency_penalty", 0.0) * own + options.get("presence_penalty", 0.0) * (own > 0)
    logits /= options.get("temperature", 1.0)
    found: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    found[found < options.get("min_p", 0.0)] = 0.0
    found /= found.sum(axis=1, keepdims=True)
    top_p = options.get("top_p", 1.0)
    if top_p < 1:
        order = np.argsort(-found, axis=1)
        ordered = np.take_along_axis(found, order, axis=1)
        ordered[np.cumsum(ordered, axis=1) - ordered >= top_p] = 0.0
        np.put_along_axis(found, order, ordered, axis=1)
        found /= found.sum(axis=1, keepdims=True)
    return found


def p_value(seen: Ints, expected: Floats) -> float:
    """Pearson's chi-square test of groups of independent draws, each group from its own distribution.

    Args:
        seen: [groups, tokens] how often each token was drawn.
        expected: [groups, tokens] how often that was to be expected of as many draws; 0 is never.
    """
    if seen[expected == 0].any():
        return 0.0
    statistic, freedom = 0.0, 0
    for counts, means in zip(seen.tolist(), expected.tolist(), strict=True):
        cells = _cells(counts, means)
        statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
        freedom += max(0, len(cells) - 1)
    assert freedom, "too few draws for any test"
    degrees, half = (torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, statistic))
    return float(torch.special.gammaincc(degrees, half))


def _cells(counts: list[int], means: list[float]) -> list[tuple[float, float]]:
    """(seen, expected) of tokens, of rare ones together. None where the whole group is rare."""
    cells: list[tuple[float, float]] = []
    count, mean = 0.0, 0.0
    for token in sorted(range(len(means)), key=means.__getitem__):
        count, mean = count + counts[token], mean + means[token]
        if mean >= FEWEST:
            cells.append((count, mean))
            count, mean = 0.0, 0.0
    if cells:
        last = cells.pop()
        cells.append((last[0] + count, last[1] + mean))
    return cells
