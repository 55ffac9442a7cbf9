"""Drafts that are drawn with the model's own noise."""

import torch

from troupellm.kernels.sampling.noise import stream_key, token_codes
from troupellm.models.proposers.base import RowDraws
from troupellm.models.proposers.coupled_draws import draw_coupled
from troupellm.models.sampling.sampler import Sampler
from troupellm.protocol.messages.worker import SamplingState

VOCAB, ROWS = 50, 64


def drawn(logits: torch.Tensor, states: list[SamplingState], positions: list[int]) -> torch.Tensor:
    sampler = Sampler(VOCAB, torch.device("cpu"))
    for row, state in enumerate(states):
        sampler.add_row(row, state, [0], 1)
    return sampler.sample(logits.clone(), range(len(states)), positions, [torch.zeros(99)] * len(states)).tokens


def test_the_same_logits_give_the_tokens_of_the_sampler() -> None:
    states = [SamplingState(temperature=0.5 * (row % 3), seed=row) for row in range(ROWS)]
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    draws = RowDraws(
        torch.tensor([stream_key(state.seed, state.fork) for state in states]),
        torch.tensor([1 / state.temperature if state.temperature else 0.0 for state in states]),
    )
    positions = list(range(1, ROWS + 1))
    kept = logits.clone()
    found = draw_coupled(logits, draws, torch.tensor(positions), token_codes(VOCAB, torch.device("cpu")))
    assert torch.equal(found, drawn(logits, states, positions))
    assert torch.equal(logits, kept)


def test_like_logits_give_the_same_tokens_mostly() -> None:
    generator = torch.Generator().manual_seed(2)
    states = [SamplingState(seed=row) for row in range(512)]
    logits = torch.randn(1, VOCAB, generator=generator).expand(512, -1)
    others = logits + 0.2 * torch.randn(1, VOCAB, generator=generator)
    draws = RowDraws(torch.tensor([stream_key(row, 0) for row in range(512)]), torch.ones(512))
    found = draw_coupled(others.contiguous(), draws, torch.full((512,), 7), token_codes(VOCAB, torch.device("cpu")))
    agreed = (found == drawn(logits, states, [7] * 512)).float().mean().item()
    distance = 0.5 * (logits[0].softmax(-1) - others[0].softmax(-1)).abs().sum().item()
    assert 0.02 < distance < 0.5
    assert agreed >= (1 - distance) / (1 + distance) - 0.05
