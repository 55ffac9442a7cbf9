"""Operands of every size: what a newcomer asks first, `1 + 1`, is no rarity in the training text."""

import random
from collections import Counter

import pytest

from troupellm.training import arithmetic, corpus
from troupellm.training.arithmetic import Problem
from troupellm.training.evaluate import NAMES, cases, table


@pytest.fixture(scope="module")
def drawn() -> list[Problem]:
    rng = random.Random(1)
    return [arithmetic.draw_problem(rng) for _ in range(40_000)]


def test_one_problem_in_eight_has_two_single_digits_and_most_others_have_two_digits(drawn: list[Problem]) -> None:
    sizes = Counter((len(str(a)), len(str(b))) for a, _, b in drawn)
    shares = {size: count / len(drawn) for size, count in sizes.items()}
    assert 0.10 < shares[1, 1] < 0.17
    assert 0.19 < shares[1, 2] < 0.27
    assert 0.19 < shares[2, 1] < 0.27
    assert 0.35 < shares[2, 2] < 0.45


def test_every_pair_of_single_digits_is_drawn(drawn: list[Problem]) -> None:
    seen = set(drawn)
    small = [problem for sign in "+-" for problem in arithmetic.small_problems(sign)]
    assert not [problem for problem in small if arithmetic.is_held_out(problem)]
    assert not [problem for problem in small if max(problem[0], problem[2]) < 10 and problem not in seen]


def test_large_operands_are_drawn_too(drawn: list[Problem]) -> None:
    assert {a for a, _, _ in drawn} == {b for _, _, b in drawn} == set(range(arithmetic.LIMIT))


def test_every_stage_shares_out_the_whole_text() -> None:
    for stage in (0, 1, corpus.CONTINUED):
        assert sum(shares[stage] for _, *shares in corpus.MIXTURE) == pytest.approx(1.0)


def test_a_run_from_nothing_reads_no_conversation_of_sums_alone() -> None:
    made = {make: shares for make, *shares in corpus.MIXTURE}[corpus.calculating]
    assert made[:2] == [0.0, 0.0]
    assert made[corpus.CONTINUED] > 0.0


def test_every_small_problem_is_evaluated_in_every_usual_wording() -> None:
    asked = cases(0)
    for name in ("small sums", "small differences"):
        assert len(asked[f"{name}, plain"]) == 169
        assert len({case.prompt for case in asked[name]}) == 8 * 169
    first = asked["small sums, plain"][13 + 1]
    assert "<|im_start|>user\nWhat is 1 + 1?<|im_end|>" in first.prompt
    assert first.passes("1 + 1 = 2.")
    assert not first.passes("1 + 1 = 4.")


def test_the_usual_wordings_are_among_those_of_the_training_text() -> None:
    for sign in "+-":
        phrases, _ = arithmetic.PHRASES[sign]
        trained = {frame.replace("{x}", phrase) for frame in arithmetic.FRAMES for phrase in phrases}
        known = {text.lower().rstrip("?.") for text in trained}
        assert {wording.lower().rstrip("?.") for wording in arithmetic.USUAL[sign]} <= known


def test_the_table_has_the_order_of_the_names() -> None:
    rows = table({"counting": (1, 2), "small sums": (3, 4), "sums": (5, 5)}).splitlines()[2:]
    assert rows == [
        f"| {NAMES['sums']} | 5 | 100.0 % |",
        f"| {NAMES['small sums']} | 4 | 75.0 % |",
        f"| {NAMES['counting']} | 2 | 50.0 % |",
    ]
