"""Rows with drafts get the same tokens as without, for all drafts: through the runner, on a tiny model."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_drafts import DraftError, Drafts, RowDrafts, read_drafts
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import Decoder
from troupellm.models.proposers.base import Proposer
from troupellm.models.runner.runner import ModelRunner
from troupellm.models.speculation.speculator import Speculator
from troupellm.models.speculation.synthetic_acceptance import SyntheticAcceptance
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig, ModelConfig
from troupellm.protocol.messages.worker import StepPlan, ThinkingState
from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, write_tiny_model
from troupellm.tests.support.speculation.scripted_drafts import Key, ScriptedProposer, SpeculativeHost

TOKENS, LENGTH = 24, 96
PROMPTS = [np.random.default_rng(seed).integers(0, 256, 3 + 7 * seed).tolist() for seed in range(4)]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "cut": {"temperature": 1.3, "seed": 6, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "seed": 7, "presence_penalty": 1.5, "frequency_penalty": 0.7,
                  "repetition_penalty": 1.4},
    "greedy penalties": {"repetition_penalty": 1.6, "presence_penalty": 2.0},
    "bias": {"temperature": 0.7, "seed": 8, "logit_bias": ((3, 4.0), (9, -100.0)),
             "allowed_token_ids": tuple(range(60))},
    "bad words": {"temperature": 0.2, "seed": 9, "bad_words": ((7,), (12, 3), (5, 6, 7)),
                  "allowed_token_ids": (3, 5, 6, 7, 12)},
    "min tokens": {"temperature": 1.0, "seed": 10, "min_tokens": 12, "stop_token_ids": tuple(range(100, 250))},
    "logprobs": {"logprobs": 3},
    "processed logprobs": {"temperature": 1.0, "seed": 11, "logprobs": 2, "logprobs_mode": "processed_logprobs",
                           "top_k": 5},
    "thinking": {"temperature": 1.0, "seed": 12,
                 "thinking": ThinkingState(budget=5, open=True, starts=((1, 2),), ends=((40, 41, 42),))},
}  # fmt: skip

Make = Callable[[Proposer | None], ModelRunner]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, KVCache]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    worker = ModelWorker(folder)
    worker.load(EngineConfig(model=ModelConfig(model=str(folder))), lambda progress: None)
    runner = worker.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.decoder, Decoder)
    return runner.decoder, KVCache(runner.decoder.config, 200, 8, torch.float32)


def make(parts: tuple[Decoder, KVCache], proposer: Proposer | None, **more: Any) -> ModelRunner:
    if proposer is None:
        return ModelRunner(*parts, max_model_len=LENGTH)
    return ModelRunner(
        *parts,
        max_model_len=LENGTH,
        speculation=lambda rows, options, guides: Speculator(proposer, rows, options, LOGITS_WIDTH, **more),
    )


def fill(host: SpeculativeHost, names: Sequence[str]) -> None:
    for row, name in enumerate(names):
        host.add(row, PROMPTS[row % len(PROMPTS)], **OPTIONS[name])


@pytest.fixture(scope="module")
def plain(parts: tuple[Decoder, KVCache]) -> SpeculativeHost:
    """Every kind of row, without speculation."""
    host = SpeculativeHost(make(parts, ScriptedProposer({}, LOGITS_WIDTH)), 0)
    fill(host, list(OPTIONS))
    host.run(TOKENS + 8)
    return host


def truth_of(host: SpeculativeHost) -> dict[Key, list[int]]:
    return {
        (tuple(text[: host.prompts[row]]), list(OPTIONS.values())[row].get("seed", 0), 0): text[host.prompts[row] :]
        for row, text in host.tokens.items()
    }


@pytest.mark.parametrize(
    ("right", "branches"),
    [
        (0.7, 1),
        (1.0, 1),
        (0.0, 2),
        (0.9, 3),
        *(pytest.param(right, branches, marks=pytest.mark.slow) for right, branches in ((0.0, 1), (0.7, 2))),
    ],
)
def test_tokens_and_logprobs_are_those_without(
    parts: tuple[Decoder, KVCache], plain: SpeculativeHost, right: float, branches: int
) -> None:
    proposer = ScriptedProposer(truth_of(plain), LOGITS_WIDTH, right=right, branches=branches)
    host = SpeculativeHost(make(parts, proposer), 6 * branches)
    fill(host, list(OPTIONS))
    found = host.run(TOKENS, chunk=5)
    for row, name in enumerate(OPTIONS):
        assert found[row] == plain.tokens[row][plain.prompts[row] :][:TOKENS], name
    assert not host.errors
    assert host.drafted > 100
    assert (host.accepted == 0) if right == 0 else host.accepted > 0.5 * right**2 * host.drafted / branches
    for row, told in host.logprobs.items():
        for (at, ids, values), (other_at, other_ids, others) in zip(told, plain.logprobs[row], strict=False):
            assert at == other_at
            assert ids == other_ids
            assert np.allclose(np.frombuffer(values, "<f4"), np.frombuffer(others, "<f4"), atol=1e-4)
    if right == 1.0:
        assert host.steps < 0.6 * plain.steps


def test_a_proposer_sees_what_was_kept_and_nothing_else(parts: tuple[Decoder, KVCache], plain: SpeculativeHost) -> None:
    sums = []
    for branches, right in ((1, 0.0), (2, 0.7)):
        proposer = ScriptedProposer(
            truth_of(plain),
            LOGITS_WIDTH,
            right=right,
            branches=branches,
            aux_hidden_states=AuxHiddenStates(last=True, layers=(0,)),
        )
        runner = make(parts, proposer)
        host = SpeculativeHost(runner, 5)
        fill(host, list(OPTIONS))
        host.run(TOKENS, chunk=4)
        for row, text in host.tokens.items():
            slot = runner.rows.slot(row)
            seen = [at for start, count in proposer.observed[slot] for at in range(start, start + count)]
            assert seen == list(range(len(text) - 1))
        sums.append(proposer.sums)
        last = dict(host.tokens)
        host.finished |= set(last)
        host.runner.run(
            StepPlan(step=99, engine_epoch=0, rows=(), epochs=(), starts=(), counts=(), freed_rows=tuple(last))
        )
        assert proposer.dropped == list(last.values())
    for slot, shown in sums[0].items():
        for at in set(shown) & set(sums[1][slot]):
            assert abs(shown[at] - sums[1][slot][at]) < 1e-3


def test_nan_behind_a_refused_draft_harms_nobody(
    parts: tuple[Decoder, KVCache], plain: SpeculativeHost, monkeypatch
) -> None:
    healthy = Decoder.logits

    def poisoned(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        logits = healthy(self, hidden)
        if logits.shape[0] > 1:
            logits[1:] = torch.nan  # behind the drafts, all of which are wrong
        return logits

    monkeypatch.setattr(Decoder, "logits", poisoned)
    host = SpeculativeHost(make(parts, ScriptedProposer(truth_of(plain), LOGITS_WIDTH, right=0.0)), 5)
    fill(host, ["greedy"])
    assert host.run(TOKENS)[0] == plain.tokens[0][plain.prompts[0] :][:TOKENS]
    assert host.drafted
    assert not host.errors


def test_nan_behind_a_kept_draft_fails_the_row_a_step_later(
    parts: tuple[Decoder, KVCache], plain: SpeculativeHost, monkeypatch
) -> None:
    healthy = Decoder.logits
    left = [TOKENS // 2]

    def poisoned(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        logits = healthy(self, hidden)
        fine, left[0] = max(left[0], 0), left[0] - logits.shape[0]
        logits[fine:] = torch.nan
        return logits

    monkeypatch.setattr(Decoder, "logits", poisoned)
    host = SpeculativeHost(make(parts, ScriptedProposer(truth_of(plain), LOGITS_WIDTH, right=1.0)), 5)
    fill(host, ["greedy"])
    found = host.run(TOKENS)[0]
    assert "NaN" in host.errors[0]
    assert len(found) >= 2
    assert found == plain.tokens[0][plain.prompts[0] :][: len(found)]


class Pattern:
    """Rests and drafts in turn, for three steps of five."""

    def __init__(self) -> None:
        self.asked = self.cut = 0

    def add_row(self, slot: int) -> None:
        """Every row may draft."""

    def rests(self, batch_size: int, moment: float, *, mixed: bool = False, left: int = 0) -> int:
        self.asked, self.cut = self.asked + 1, self.cut + left
        return 3 if self.asked % 3 == 1 else 0

    def limits(self, slots: np.ndarray, batch_size: int, most: np.ndarray) -> np.ndarray:
        return most

    def learn(self, slots: np.ndarray, drafted: np.ndarray, kept: np.ndarray, proposing: float) -> None:
        """Learns nothing."""


def test_a_controller_hears_of_drafts_of_kept_ones_and_of_the_time_that_proposing_took(
    parts: tuple[Decoder, KVCache], plain: SpeculativeHost
) -> None:
    """By a clock that says so, each proposal takes a second."""
    seen: list[tuple[int, int, float]] = []

    class Length(Pattern):
        def rests(self, batch_size: int, moment: float, *, mixed: bool = False, left: int = 0) -> int:
            return 0

        def learn(self, slots: np.ndarray, drafted: np.ndarray, kept: np.ndarray, proposing: float) -> None:
            seen.append((int(drafted.sum()), int(kept.sum()), proposing))

    proposer = ScriptedProposer(truth_of(plain), LOGITS_WIDTH)
    ticks = itertools.count(0.0)
    host = SpeculativeHost(make(parts, proposer, length=Length(), clock=lambda: next(ticks)), 5)
    fill(host, ["greedy"])
    host.run(TOKENS)
    assert {asking for drafted, _, asking in seen if drafted} == {1.0}
    assert sum(drafted for drafted, _, _ in seen) == host.drafted
    assert sum(kept for _, kept, _ in seen) == host.accepted > 0


class Dozing(ScriptedProposer):
    """Counts what it is not shown."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.missed = 0

    def miss(self, slots: np.ndarray, starts: np.ndarray) -> None:
        assert slots.shape == starts.shape
        self.missed += slots.size


@pytest.mark.parametrize("branches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_in_which_nobody_drafts_change_no_token(
    parts: tuple[Decoder, KVCache], plain: SpeculativeHost, branches: int
) -> None:
    length, aux_hidden_states = Pattern(), AuxHiddenStates(last=True)
    proposer = Dozing(truth_of(plain), LOGITS_WIDTH, right=0.8, branches=branches, aux_hidden_states=aux_hidden_states)
    host = SpeculativeHost(make(parts, proposer, length=length), 4 * branches)
    fill(host, list(OPTIONS))
    found = host.run(TOKENS, chunk=5)
    for row, name in enumerate(OPTIONS):
        assert found[row] == plain.tokens[row][plain.prompts[row] :][:TOKENS], name
    assert not host.errors
    assert host.accepted > 20
    assert length.asked < 0.8 * host.steps, "it is asked once for a rest"
    assert proposer.missed > len(OPTIONS)


def test_rows_end_where_the_context_does(parts: tuple[Decoder, KVCache], plain: SpeculativeHost) -> None:
    runner = make(parts, ScriptedProposer(truth_of(plain), LOGITS_WIDTH, right=1.0))
    host = SpeculativeHost(runner, 20)
    fill(host, ["greedy"])
    for _ in range(LENGTH):
        host.step()
    assert len(host.tokens[0]) == LENGTH
    assert not host.errors


def test_synthetic_acceptance_has_the_length_that_was_asked_for(parts: tuple[Decoder, KVCache]) -> None:
    lot = SyntheticAcceptance(3.0, 4)
    runner = make(parts, ScriptedProposer({}, LOGITS_WIDTH), synthetic=lot, most=4)
    host = SpeculativeHost(runner, 4)
    for row in range(8):
        host.add(row, PROMPTS[row % 4], seed=row)
    host.run(60)
    # The last steps before the context's end may be shorter.
    assert 2.7 < 1 + host.accepted / (host.drafted / 4) < 3.3
    mean = sum(1 + lot.count(seed, position, 4) for seed in range(50) for position in range(0, 500, 5)) / 5000
    assert abs(mean - 3.0) < 0.05


def test_each_node_of_a_draft_tree_sees_its_ancestors_in_the_window() -> None:
    drafts = RowDrafts([5, 6, 7, 8, 9, 4], [-1, -1, 0, 2, 3, 1])
    for window in (None, 1, 2, 3, 4, 9):
        paths = [drafts.ancestors(node) for node in range(6)]
        expected = [sum(1 << node for node in (path if window is None else path[-window:])) for path in paths]
        assert drafts.seen(window).tolist() == expected
    assert drafts.depths().tolist() == [0, 0, 1, 2, 3, 1]
    assert RowDrafts([1] * 64).seen(None)[-1] == 2**64 - 1
    assert drafts.accepted([5, 7, 0, 8, 1, 0, 0]) == [0, 2, 3]
    drafts.keep([0, 1, 2, 5])
    assert drafts.parents == [-1, -1, 0, 1]


@pytest.mark.parametrize(
    "drafts",
    [
        Drafts(np.zeros((1, 3), np.int32), np.array([4])),
        Drafts(np.zeros((2, 3), np.int32), np.array([1, 1])),
        Drafts(np.array([[1, LOGITS_WIDTH]], np.int32), np.array([2])),
        Drafts(np.array([[1, -1]], np.int32), np.array([2])),
        Drafts(np.array([[1, 2]], np.int32), np.array([2]), np.array([[0, -1]], np.int32)),
        Drafts(np.array([[1, 1]], np.int32), np.array([2]), np.array([[-1, -1]], np.int32)),
    ],
)
def test_what_no_drafts_are_is_refused(drafts: Drafts) -> None:
    with pytest.raises(DraftError):
        read_drafts(drafts, [3], LOGITS_WIDTH)
