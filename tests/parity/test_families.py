"""Every family equals `transformers` on a small random checkpoint: greedy tokens and logits, however a plan is cut.

A token may differ only where the reference's own two best logits are closer than 1e-4, and the log-probabilities of
both after the same tokens are equal within 1e-4.
"""

import pytest
import torch

from troupellm.models.hub.source import resolve_model
from troupellm.models.runner import runner as runner_module
from troupellm.protocol.config.engine import ModelConfig
from troupellm.tests.support.checkpoints.close_calls import LIKELIEST, TOLERANCE, assert_close_call
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES, VARIANTS
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.ragged_batch import check_ragged_batch
from troupellm.tests.support.checkpoints.watched_logits import watched_logits

ROWS = [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in FAMILIES]


@pytest.fixture(scope="module", params=ROWS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), FAMILIES[request.param]())


slow = pytest.mark.slow
"""Of the cuts that the ragged batch below has, too; it is in `make test` for every family."""


@pytest.mark.parametrize("length", [pytest.param(1, marks=slow), pytest.param(8, marks=slow), 45])
def test_prefill_and_decode_give_the_tokens_of_transformers(pair: Pair, length: int) -> None:
    prompt = make_prompt(length)
    driver = Driver(pair.runner())
    driver.submit(4, prompt)
    driver.generate(4, 12)
    pair.check(prompt, driver.answer(4))


@pytest.mark.parametrize("chunk", [7, pytest.param(19, marks=slow)])
def test_a_prompt_in_chunks_gives_the_tokens_of_transformers(pair: Pair, chunk: int) -> None:
    prompt = make_prompt(50)
    driver = Driver(pair.runner())
    driver.submit(0, prompt)
    while driver.done[0] < len(prompt):
        result = driver.run({0: min(chunk, len(prompt) - driver.done[0])})
        assert len(result.tokens) == (driver.done[0] == len(prompt))
    driver.generate(0, 8)
    pair.check(prompt, driver.answer(0))


@pytest.mark.parametrize("piece", [runner_module.PIECE_TOKENS, pytest.param(11, marks=slow)])
def test_a_ragged_batch_with_prefill_and_decode_mixed(pair: Pair, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "PIECE_TOKENS", piece)
    check_ragged_batch(pair)


def test_logits_are_within_tolerance(pair: Pair) -> None:
    assert_logits_are_within_tolerance(pair)


def test_logits_of_the_builtin_model_are_within_tolerance() -> None:
    assert_logits_are_within_tolerance(Pair.stored(resolve_model(ModelConfig(), lambda _: None)))


def assert_logits_are_within_tolerance(pair: Pair) -> None:
    driver = Driver(pair.runner())
    prompt = make_prompt(40)
    driver.submit(0, prompt)
    with watched_logits(driver.runner) as seen:
        driver.run({0: 23})
        driver.generate(0, 6)
    expected = pair.logits(driver.tokens[0])[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_preemption_by_recompute_goes_on_with_the_same_tokens(pair: Pair) -> None:
    prompt = make_prompt(21)
    driver = Driver(pair.runner())
    driver.submit(0, prompt)
    driver.generate(0, 5)
    again = Driver(pair.runner(), seed=8)
    again.submit(0, driver.tokens[0])
    again.generate(0, 5)
    pair.check(prompt, driver.answer(0) + again.answer(0))


CALL = [9.0, 9.00005, 3.0, 2.0, 1.0, 0.0]


def own_of(logits: list[float]) -> dict[int, float]:
    likely = torch.tensor(logits).log_softmax(-1).topk(LIKELIEST)
    return dict(zip(likely.indices.tolist(), likely.values.tolist(), strict=True))


def test_a_close_call_that_both_see_is_forgiven() -> None:
    assert_close_call(3, 0, torch.tensor(CALL), own_of([9.00006, 9.0, *CALL[2:]]))


@pytest.mark.parametrize(
    ("got", "reference", "own", "reason"),
    [
        (0, [9.0, 9.0002, *CALL[2:]], [9.0002, 9.0, *CALL[2:]], "gap"),
        (2, CALL, CALL, "behind its best"),
        (0, CALL, [9.3, 9.0, *CALL[2:]], "not close"),
        (0, CALL, [9.0, 9.0, 7.0, *CALL[3:]], "not close"),
    ],
    ids=["the reference decides", "another token", "other logits", "another third"],
)
def test_no_other_mismatch_is_forgiven(got: int, reference: list[float], own: list[float], reason: str) -> None:
    """A small gap of the reference does not excuse every token of the engine."""
    with pytest.raises(AssertionError, match=reason):
        assert_close_call(3, got, torch.tensor(reference), own_of(own))


def test_this_engines_logits_after_any_tokens_are_found_again_and_another_token_is_noticed(pair: Pair) -> None:
    tokens, plain = make_prompt(30), pair.decoder.logits
    torch.testing.assert_close(pair.own_logits(tokens), pair.logits(tokens)[-1], atol=TOLERANCE, rtol=TOLERANCE)
    assert pair.decoder.logits == plain
    wrong = (pair.greedy(tokens, 1)[0] + 1) % pair.config.vocab_size
    with pytest.raises(AssertionError, match=f"token 0 is {wrong}"):
        pair.check(tokens, [wrong])
