"""Defines sampling, one row and one token at a time: Python integers and float64, no shortcuts.

The fast functions must give the same tokens, except where float32 rounds two candidates to the same score.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from troupellm.protocol.messages.worker import SamplingState

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1


def log_exponential(seed: int, fork: int, purpose: int, position: int, token_id: int) -> float:
    """The noise of one token: the logarithm of a standard exponential variable."""
    key = 0
    for word in (seed, fork, purpose, position):
        key = _splitmix((key ^ word) + 0x9E3779B97F4A7C15)
    code = ((token_id + 1) * 0x9E3779B97F4A7C15) & _MASK64
    code = (code ^ (code >> 29)) >> 32
    hashed = code ^ (key & _MASK32)
    hashed = ((hashed ^ (hashed >> 17)) * 0xED5AD4BB) & _MASK32
    hashed = (((hashed ^ (hashed >> 11)) + (key >> 32)) * 0xAC4C1B51) & _MASK32
    hashed = ((hashed ^ (hashed >> 15)) * 0x31848BAB) & _MASK32
    hashed ^= hashed >> 14
    return math.log(-math.log1p(-((hashed & 0x7FFFFFFF) + 0.5) * 2.0**-31 * (1 - 2.0**-24)))


def distribution(logits: Tensor, state: SamplingState, tokens: Sequence[int], num_prompt_tokens: int) -> Tensor:
    """Probabilities of the next token, float64 [vocab].

    Args:
        logits: [vocab].
        tokens: the sequence so far, prompt first.
    """
    adjusted = _penalized(
        _masked(logits.double().clone(), state, tokens, num_prompt_tokens), state, tokens, num_prompt_tokens
    )
    if state.temperature < 1e-5:
        return torch.nn.functional.one_hot(adjusted.argmax(), len(adjusted)).double()
    probabilities = (adjusted / state.temperature).softmax(-1)
    probabilities[probabilities < state.min_p * probabilities.max()] = 0
    order = sorted(range(len(probabilities)), key=lambda token: -float(probabilities[token]))
    if state.top_k:
        fewest = float(probabilities[order[min(state.top_k, len(order)) - 1]])
        probabilities[probabilities < fewest] = 0
    if state.top_p < 1:
        wanted = state.top_p * float(probabilities.sum())
        smallest, mass = 0.0, 0.0
        for token in order:
            if mass < wanted:
                smallest = float(probabilities[token])
            mass += float(probabilities[token])
        probabilities[probabilities < smallest] = 0
    return probabilities / probabilities.sum()


def draw(probabilities: Tensor, seed: int, fork: int, position: int) -> int:
    """The token that wins the exponential race."""
    likely: list[int] = probabilities.nonzero().squeeze(1).tolist()
    return max(likely, key=lambda t: math.log(probabilities[t]) - log_exponential(seed, fork, 0, position, t))


def _masked(logits: Tensor, state: SamplingState, tokens: Sequence[int], num_prompt_tokens: int) -> Tensor:
    if state.allowed_token_ids:
        forbidden = torch.ones(len(logits), dtype=torch.bool)
        forbidden[list(state.allowed_token_ids)] = False
        logits[forbidden] = -torch.inf
    generated = list(tokens[num_prompt_tokens:])
    for word in state.bad_words:
        before = list(word[:-1])
        if not before or generated[-len(before) :] == before:
            logits[word[-1]] = -torch.inf
    if len(generated) < state.min_tokens:
        logits[list(state.stop_token_ids)] = -torch.inf
    for token_id, value in state.logit_bias:
        logits[token_id] += value
    return logits


def _penalized(logits: Tensor, state: SamplingState, tokens: Sequence[int], num_prompt_tokens: int) -> Tensor:
    for token_id in set(tokens):
        factor = state.repetition_penalty
        logits[token_id] *= factor if logits[token_id] <= 0 else 1 / factor
    generated = list(tokens[num_prompt_tokens:])
    for token_id in set(generated):
        logits[token_id] -= state.presence_penalty + state.frequency_penalty * generated.count(token_id)
    return logits


def _splitmix(word: int) -> int:
    word &= _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)
