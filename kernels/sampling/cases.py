"""Named sampling options and logits that the tests and the benchmark share."""

from typing import NamedTuple

import torch
from torch import Tensor

from troupellm.protocol.messages.worker import SamplingState


class Case(NamedTuple):
    name: str
    state: SamplingState
    spread: float = 3.0
    """Standard deviation of the logits: 1 is nearly flat, 4 as peaked as a trained model."""


VOCAB = 600
"""Vocabulary of the small cases: wider than a prefix of the largest logits, so that both paths are taken."""

CASES = (
    Case("greedy", SamplingState(temperature=0.0)),
    Case("denormal temperature", SamplingState(temperature=1e-310)),
    Case("plain", SamplingState()),
    Case("hot", SamplingState(temperature=2.0)),
    Case("cold", SamplingState(temperature=0.05)),
    Case("top_k", SamplingState(top_k=5)),
    Case("top_k of everything", SamplingState(top_k=VOCAB)),
    Case("top_k beyond the first prefix", SamplingState(top_k=100), 1.0),
    Case("top_k beyond every prefix", SamplingState(top_k=400), 1.0),
    Case("top_p", SamplingState(top_p=0.9)),
    Case("top_p on flat logits", SamplingState(top_p=0.95), 0.5),
    Case("tiny top_p", SamplingState(top_p=1e-6)),
    Case("top_k and top_p", SamplingState(top_k=50, top_p=0.9)),
    Case("wide top_k and top_p", SamplingState(top_k=300, top_p=0.8), 1.0),
    Case("min_p", SamplingState(min_p=0.05)),
    Case("min_p and top_p", SamplingState(min_p=0.02, top_p=0.8, temperature=1.3)),
    Case("min_p of 1", SamplingState(min_p=1.0)),
    Case("bias", SamplingState(logit_bias=((3, 5.0), (7, -100.0), (11, 100.0)))),
    Case("allowed", SamplingState(allowed_token_ids=(2, 3, 5, 7, 599))),
    Case("allowed and top_p", SamplingState(allowed_token_ids=(2, 3, 5, 7, 599), top_p=0.7)),
    Case("bad words", SamplingState(bad_words=((4,), (8, 9), (9, 8, 10), (8, 10)), temperature=0.7)),
    Case("min_tokens", SamplingState(min_tokens=100, stop_token_ids=(1, 2, 3))),
    Case("min_tokens reached", SamplingState(min_tokens=3, stop_token_ids=(1, 2, 3))),
    Case("repetition", SamplingState(repetition_penalty=1.3)),
    Case("presence and frequency", SamplingState(presence_penalty=1.5, frequency_penalty=0.7)),
    Case("greedy with penalties", SamplingState(temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.0)),
    Case(
        "everything",
        SamplingState(
            temperature=0.8,
            top_k=40,
            top_p=0.95,
            min_p=0.001,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=0.8,
            logit_bias=((8, 2.0), (20, -3.0)),
            allowed_token_ids=tuple(range(0, VOCAB, 2)),
            bad_words=((4,), (8, 6)),
            min_tokens=50,
            stop_token_ids=(0, 12),
            logprobs=3,
        ),
    ),
)


def make_logits(rows: int, vocab: int, spread: float, seed: int) -> Tensor:
    """float32 [rows, vocab], normal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator, dtype=torch.float32) * spread
