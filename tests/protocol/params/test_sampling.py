"""Sampling parameters: every range, type and cross rule, and that the message names the field and the range."""

import math

import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.sampling import Limits, SamplingParams

LIMITS = Limits(vocab_width=100, max_model_len=512, max_logprobs=5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", "1"), ("temperature", True), ("temperature", 10**400), ("temperature", None),
        ("top_p", 0.0), ("top_p", 1.01), ("min_p", -0.01), ("min_p", 1.5), ("presence_penalty", 2.01),
        ("frequency_penalty", -2.01), ("repetition_penalty", 0.0), ("repetition_penalty", math.inf),
        ("n", 0), ("n", -1), ("n", 1.5), ("n", "2"), ("n", True), ("n", 10**9), ("n", 2**63),
        ("top_k", -2), ("top_k", 1.0), ("seed", 2**63), ("seed", 1.5), ("max_tokens", 0), ("max_tokens", "10"),
        ("min_tokens", -1), ("min_tokens", None), ("logprobs", -2), ("logprobs", True), ("prompt_logprobs", 0.5),
        ("priority", 2**31), ("stop", ""), ("stop", [""]), ("stop", ["a"] * 17), ("stop", "a" * 513),
        ("stop", 5), ("stop", [5]), ("stop_token_ids", [-1]), ("stop_token_ids", "12"), ("stop_token_ids", [1.0]),
        ("allowed_token_ids", []), ("allowed_token_ids", [True]), ("bad_words", [""]), ("bad_words", ["a"] * 129),
        ("bad_words", "word"), ("allowed_token_ids", [1, 2**31]), ("stop_token_ids", [1, None]),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101.0}), ("logit_bias", {1: math.nan}), ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}), ("ignore_eos", 1), ("detokenize", None),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message
    assert len(caught.value.message) < 512


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0), ("temperature", -0.0), ("temperature", 1e-320), ("temperature", 2.0), ("top_p", 1e-9),
        ("top_k", -1), ("seed", -(2**63)), ("seed", 2**63 - 1), ("max_tokens", None), ("logprobs", 0),
        ("stop", "x"), ("stop", ["x", "y"]), ("stop", []), ("logit_bias", {}), ("stop_token_ids", []),
        ("stop_token_ids", [0, 2**31 - 1]), ("n", 64),
    ],
)  # fmt: skip
def test_the_edges_of_the_ranges_are_accepted(field: str, value: object) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_denormal_temperatures_are_greedy() -> None:
    assert SamplingParams(temperature=1e-320).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_min_tokens_beyond_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_stop_strings_are_refused_without_detokenizing() -> None:
    with pytest.raises(InvalidRequest, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_are_held_against_the_logits_width(field: str) -> None:
    def value(token_id: int) -> object:
        return {token_id: 1.0} if field == "logit_bias" else [token_id]

    SamplingParams(**{field: value(99)}).check_against(LIMITS)
    with pytest.raises(InvalidRequest, match=r"\[0, 99\]") as caught:
        SamplingParams(**{field: value(100)}).check_against(LIMITS)
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_capped(field: str) -> None:
    SamplingParams(**{field: 5}).check_against(LIMITS)
    for wanted in (6, -1):
        with pytest.raises(InvalidRequest, match=r"\[0, 5\]"):
            SamplingParams(**{field: wanted}).check_against(LIMITS)
    SamplingParams(**{field: -1}).check_against(Limits(vocab_width=100, max_model_len=9, max_logprobs=100))


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("n", 10**9, "got 1000000000"),
        ("max_tokens", 2**53 + 1, "got 9007199254740993"),
        ("top_k", -(10**7), "got -10000000"),
        ("temperature", 1e9, "got 1000000000"),
        ("temperature", 2.5, "got 2.5"),
        ("temperature", 1e300, "got 1e+300"),
        ("n", 10**30, "got a larger number"),
    ],
)
def test_numbers_are_shown_as_they_were_written(field: str, value: float, shown: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.message.endswith(shown)


def test_best_of_is_at_least_n() -> None:
    assert SamplingParams(n=2, best_of=2).num_sequences == 2
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    with pytest.raises(InvalidRequest, match=r"best_of must be at least n \(2\), got 1") as caught:
        SamplingParams(n=2, best_of=1)
    assert caught.value.param == "best_of"
