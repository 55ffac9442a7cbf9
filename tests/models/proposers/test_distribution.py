"""Draws with drafts have the model's distribution: chi-square tests over 10^5 draws from a toy vocabulary, over fewer
in `make test`.

The model is a table of logits by the last token, the rest is the engine's own runner. The probabilities of each draw
are computed here separately, from the row's history.

`ngram` and `suffix` draft here themselves. Drafters that are models give point masses, coupled draws or trees,
each of which a table gives here; with layers of their own they draft in `test_every_proposer`.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.sampling.noise import token_codes
from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.load.implementation import describe_served
from troupellm.models.proposers.base import ProposalBatch, Proposer
from troupellm.models.proposers.coupled_draws import draw_coupled
from troupellm.models.proposers.ngram import NgramProposer
from troupellm.models.proposers.suffix import SuffixProposer
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.speculation.speculator import Speculator
from troupellm.protocol.config.engine import ModelConfig
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.kernels.exact_draws import next_token
from troupellm.tests.support.speculation.scripted_drafts import Forgetful, SpeculativeHost

VOCAB, ROWS, TOKENS, FEWER, DRAFTS = 9, 500, 200, 60, 6
PROMPT = [4, 2, 2, 7]
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(20))
LEAST_P = 1e-3
KINDS = ("point mass", "coupled", "tree", "ngram", "suffix")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.7, "temperature": 1.2},
    "min_p": {"min_p": 0.15, "temperature": 0.8},
    "logit_bias": {"logit_bias": ((3, 2.0), (5, -1.5), (8, -100.0))},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.02},
}


class ToyDecoder:
    """Logits are a row of the table."""

    batch_invariant, dtype, head, score = False, torch.float32, object(), None

    def __init__(self, config: Any) -> None:
        self.config = msgspec.structs.replace(config, vocab_size=VOCAB)

    def forward(self, batch: ForwardBatch, caches: Any) -> Tensor:
        return torch.nn.functional.one_hot(batch.token_ids[batch.logit_tokens], VOCAB).float()

    def logits(self, hidden: Tensor) -> Tensor:
        return TABLE[hidden.argmax(-1)]


class TableProposer(Forgetful):
    """Drafts from a table that is nearly the model's: its likeliest token, a draw, or a tree of the two likeliest."""

    def __init__(self, kind: str) -> None:
        self._kind, self._codes = kind, token_codes(VOCAB, torch.device("cpu"))
        self._table = TABLE + 0.3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(21))

    def propose(self, batch: ProposalBatch) -> Drafts:
        last = batch.tokens[torch.from_numpy(batch.slots), torch.from_numpy(batch.lengths - 1)].long()
        if self._kind == "tree":
            return self._trees(last, batch.limits)
        drafts = []
        for depth in range(int(batch.limits.max())):
            logits = self._table[last]
            positions = torch.from_numpy(batch.lengths + depth)
            drawn = self._kind == "coupled"
            last = draw_coupled(logits, batch.draws, positions, self._codes) if drawn else logits.argmax(-1)
            drafts.append(last)
        return Drafts(torch.stack(drafts, dim=1).to(torch.int32).numpy(), batch.limits)

    def _trees(self, last: Tensor, limits: NDArray[np.int64]) -> Drafts:
        """Two children of the root, two of each of these."""
        first = self._table[last].topk(2).indices
        second = self._table[first].topk(2).indices.flatten(1)
        tokens = torch.cat((first, second), dim=1).to(torch.int32).numpy()
        parents = np.tile(np.array([-1, -1, 0, 0, 1, 1], np.int32), (tokens.shape[0], 1))
        return Drafts(tokens, np.minimum(limits, 6), parents)


def make_proposer(kind: str) -> Proposer:
    longest = 14 * 16
    if kind == "ngram":
        return NgramProposer(lookup_min=1, lookup_max=3, max_model_len=longest)
    if kind == "suffix":
        return SuffixProposer(
            max_tree_depth=24, max_cached_requests=100, max_spec_factor=2.0, min_token_prob=0.1, max_model_len=longest
        )
    return TableProposer(kind)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[ToyDecoder, KVCache]:
    folder = write_tiny_model(Path(tmp_path_factory.mktemp("model")))
    config = describe_served(folder, ConfigReader.load(folder), ModelConfig(model=str(folder)), lambda progress: None)
    decoder = ToyDecoder(config)
    return decoder, KVCache(decoder.config, ROWS * 14 + 1, 16, torch.float32)


def texts(
    toy: tuple[ToyDecoder, KVCache], kind: str, options: dict[str, Any], tokens: int = TOKENS
) -> tuple[NDArray[np.int64], SpeculativeHost]:
    """The tokens of every row [rows, prompt + tokens]."""
    proposer = make_proposer(kind)
    runner = ModelRunner(
        *toy,
        max_model_len=14 * 16,
        speculation=lambda rows, row_options, guides: Speculator(proposer, rows, row_options, VOCAB),
    )
    host = SpeculativeHost(runner, 0 if kind == "none" else DRAFTS)
    for row in range(ROWS):
        host.add(row, PROMPT, **{"temperature": 1.0, "seed": row, **options})
    found = host.run(tokens)
    text = np.array([[*PROMPT, *found[row]] for row in range(ROWS)])
    assert text.shape == (ROWS, len(PROMPT) + tokens)
    return text, host


def probabilities(history: NDArray[np.int64], options: dict[str, Any]) -> NDArray[np.float64]:
    """Of the next token [rows, vocab]."""
    return next_token(TABLE.double().numpy()[history[:, -1]], history, len(PROMPT), options)


def p_value(text: NDArray[np.int64], options: dict[str, Any]) -> float:
    """Pearson's test of the tokens behind each token against the sums of their probabilities."""
    seen, expected = np.zeros((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    for end in range(len(PROMPT), text.shape[1]):
        chances = probabilities(text[:, :end], options)
        np.add.at(expected, text[:, end - 1], chances)
        np.add.at(seen, (text[:, end - 1], text[:, end]), 1)
    possible = expected > 0
    assert not seen[~possible].any()
    likely = expected >= 5  # where the statistic is what it should be; the others together
    rest = seen[possible & ~likely].sum(), expected[possible & ~likely].sum()
    statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = likely.sum() - (expected.sum(axis=1) > 0).sum()
    if rest[1] >= 5:
        statistic, freedom = statistic + (rest[0] - rest[1]) ** 2 / rest[1], freedom + 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))


@pytest.mark.parametrize(
    ("kind", "name", "tokens"),
    [
        ("coupled", "plain", FEWER),
        ("tree", "top_p", FEWER),
        *(pytest.param(kind, name, TOKENS, marks=pytest.mark.slow) for kind in KINDS for name in OPTIONS),
    ],
)
def test_draws_have_the_distribution_of_the_model(
    toy: tuple[ToyDecoder, KVCache], kind: str, name: str, tokens: int
) -> None:
    text, host = texts(toy, kind, OPTIONS[name], tokens)
    assert p_value(text, OPTIONS[name]) > LEAST_P
    assert host.accepted > 0.04 * host.drafted > 0
    # Of random texts little has stood there before.
    assert host.steps < tokens * (1.0 if kind in ("ngram", "suffix") else 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_draws_are_those_without_drafts(toy: tuple[ToyDecoder, KVCache], name: str) -> None:
    alone, host = texts(toy, "none", OPTIONS[name])
    assert not host.drafted
    for kind in KINDS:
        assert np.array_equal(texts(toy, kind, OPTIONS[name])[0], alone)


@pytest.mark.parametrize(("temperature", "tokens"), [(1.08, FEWER), pytest.param(1.03, TOKENS, marks=pytest.mark.slow)])
def test_another_distribution_is_noticed(toy: tuple[ToyDecoder, KVCache], temperature: float, tokens: int) -> None:
    text, _ = texts(toy, "coupled", {"temperature": temperature}, tokens)
    assert p_value(text, {}) < LEAST_P
