"""Sums and differences of numbers below one hundred.

The answer always repeats the question as ``a + b = c``: whatever the wording, the digits of the
result then follow the operands at the same few distances, which is what makes it easy to learn.
"""

import random
from functools import cache

from troupellm.models.builtin.documents import Exchange, Piece

LIMIT = 100
HELD_OUT_SHARE = 0.05
Problem = tuple[int, str, int]

SUM_WORDINGS = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "{a}+{b}",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "What's {a} + {b}?",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}",
    "Please add {a} and {b}.",
    "What do you get when you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
)
DIFFERENCE_WORDINGS = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "{a}-{b}=",
    "{a}-{b}",
    "What is {a} minus {b}?",
    "What's {a} - {b}?",
    "How much is {a} - {b}?",
    "Calculate {a} - {b}.",
    "Compute {a} - {b}",
    "What is {a} take away {b}?",
    "What do you get when you take {b} from {a}?",
    "Subtract {b} from {a}.",
    "What is the difference {a} - {b}?",
)
WORDINGS = {"+": SUM_WORDINGS, "-": DIFFERENCE_WORDINGS}


@cache
def held_out(sign: str) -> frozenset[tuple[int, int]]:
    """The pairs that no training text may contain; one fixed draw per sign."""
    draw = random.Random(f"held-out {sign}")
    pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    return frozenset(draw.sample(pairs, int(len(pairs) * HELD_OUT_SHARE)))


def is_held_out(problem: Problem) -> bool:
    """Whether a problem belongs to the evaluation."""
    a, sign, b = problem
    return (a, b) in held_out(sign)


def solve(problem: Problem) -> str:
    """The full answer line."""
    a, sign, b = problem
    return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"


def draw_problem(rng: random.Random) -> Problem:
    """A problem from the training part; differences are mostly, not always, positive."""
    while True:
        sign = rng.choice("+-")
        a, b = rng.randrange(LIMIT), rng.randrange(LIMIT)
        if sign == "-" and a < b and rng.random() < 0.4:
            a, b = b, a
        if not is_held_out((a, sign, b)):
            return a, sign, b


def draw_sum(rng: random.Random) -> Problem:
    """A sum from the training part."""
    while True:
        problem = draw_problem(rng)
        if problem[1] == "+":
            return problem


def question(rng: random.Random, problem: Problem) -> str:
    """A problem put into words."""
    a, sign, b = problem
    return rng.choice(WORDINGS[sign]).format(a=a, b=b)


def exchange(rng: random.Random) -> Exchange:
    """A question and its answer."""
    problem = draw_problem(rng)
    return Exchange(question(rng, problem), f"{solve(problem)}.", 2.0)


def drill(rng: random.Random) -> list[Piece]:
    """Lines of worked problems without any chat: the densest way to show many pairs."""
    pieces: list[Piece] = []
    for _ in range(rng.randint(6, 24)):
        left, right = solve(draw_problem(rng)).split(" =")
        pieces += [Piece(f"{left} =", 0.0), Piece(right, 2.0), Piece("\n", 0.1)]
    return pieces


def evaluation(rng: random.Random, sign: str, count: int) -> list[tuple[str, str]]:
    """Held-out questions with the answers expected."""
    pairs = rng.sample(sorted(held_out(sign)), count)
    problems: list[Problem] = [(a, sign, b) for a, b in pairs]
    return [(question(rng, problem), f"{solve(problem)}.") for problem in problems]
