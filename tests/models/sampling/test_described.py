"""The log-probabilities reported of a token, in all modes, against the definition."""

import numpy as np
import pytest
import torch

from troupellm.kernels.sampling.cases import make_logits
from troupellm.kernels.sampling.reference import distribution
from troupellm.models.sampling.sampler import Sampler
from troupellm.protocol.messages.worker import SamplingState

VOCAB, CPU = 200, torch.device("cpu")
PROMPT, TOKENS = [3, 8, 20], [3, 8, 20, 8, 9]
STATES = {
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.5},
    "plain": {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5},
    "min_p": {"temperature": 1.3, "seed": 5, "min_p": 0.2},
    "cut": {"temperature": 0.8, "seed": 6, "top_k": 20, "top_p": 0.7, "min_p": 0.01},
    "biased": {"temperature": 1.0, "seed": 7, "logit_bias": ((11, 4.0),), "allowed_token_ids": (9, 10, 11, 12)},
}


def described(states, logits):
    sampler = Sampler(VOCAB, CPU)
    for row, state in enumerate(states):
        sampler.add_row(row, state, PROMPT, len(PROMPT))
    rows = list(range(len(states)))
    found = sampler.sample(logits.clone(), rows, [len(TOKENS)] * len(rows), [torch.tensor(TOKENS)] * len(rows))
    assert not found.errors
    return found.tokens.tolist(), {entry.row: entry for entry in found.logprobs}


def columns(entry):
    ids = np.frombuffer(entry.token_ids, "<i4").tolist()
    return ids, np.frombuffer(entry.logprobs, "<f4"), np.frombuffer(entry.other_ranks, "<i4").tolist()


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_values_are_what_the_mode_says(name, mode):
    logits = make_logits(1, VOCAB, 2.0, seed=3)
    state = SamplingState(logprobs=5, logprobs_mode=mode, **STATES[name])
    [token], entries = described([state], logits)
    ids, values, _ = columns(entries[0])
    assert ids[0] == token
    if mode.startswith("raw"):
        scores = logits[0].log_softmax(-1) if mode == "raw_logprobs" else logits[0]
    elif name == "greedy":  # a token is chosen, not drawn: what it is chosen from has no temperature
        scores = logits[0].clone()
        for seen in set(TOKENS):
            scores[seen] *= 1.5 if scores[seen] < 0 else 1 / 1.5
        scores = scores.log_softmax(-1) if mode.endswith("logprobs") else scores
    else:
        scores = distribution(logits[0], state, TOKENS, len(PROMPT)).log().float()
    wanted = scores[ids].clamp(min=-9999).numpy()
    if mode == "processed_logits":  # known up to a constant from the distribution
        kept = wanted > -9999
        assert (values[~kept] == -9999).all()
        wanted, values = wanted[kept] - wanted[0], values[kept] - values[0]
    np.testing.assert_allclose(values, wanted, atol=1e-4)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_row_is_described_alike_in_any_crowd(mode):
    states = [SamplingState(logprobs=3, logprobs_mode=mode, **given) for given in STATES.values()]
    states.insert(2, SamplingState(temperature=0.0))
    logits = make_logits(len(states), VOCAB, 2.0, seed=8)
    tokens, together = described(states, logits)
    for row, state in enumerate(states):
        alone_tokens, alone = described([state], logits[row : row + 1])
        assert alone_tokens == tokens[row : row + 1]
        assert (0 in alone) == (row in together)
        if row in together:
            assert columns(alone[0])[0] == columns(together[row])[0]
            assert (columns(alone[0])[1] == columns(together[row])[1]).all()


def test_listed_tokens_come_in_their_order_with_their_ranks():
    logits = make_logits(2, VOCAB, 2.0, seed=9)
    state = SamplingState(temperature=0.0, logprobs=0, logprob_token_ids=(150, 3, 77))
    tokens, entries = described([state, SamplingState(temperature=0.0, logprobs=2)], logits)
    ids, values, ranks = columns(entries[0])
    scores = logits[0].log_softmax(-1)
    assert ids == [tokens[0], 150, 3, 77]
    np.testing.assert_allclose(values, scores[ids].numpy(), atol=1e-6)
    assert ranks == [int((scores > scores[i]).sum()) + 1 for i in (150, 3, 77)]
    assert columns(entries[1])[2] == []
