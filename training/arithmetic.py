"""Sums and differences of numbers below one hundred.

The answer always repeats the question as ``a + b = c``, for every wording. The digits of the result
then follow the operands at the same few distances, which makes the task easy to learn.
"""

import random
from functools import cache

from troupellm.training import wordings
from troupellm.training.documents import Exchange, Piece

LIMIT = 100
HELD_OUT_SHARE = 0.05
Problem = tuple[int, str, int]

SUMS = wordings.split(
    "{a} + {b}|{a} + {b}|{a} plus {b}|{a}+{b}|{a} and {b} together|the sum of {a} and {b}|the result of {a} + {b}"
    "|the total of {a} and {b}"
)[0]
DIFFERENCES = wordings.split(
    "{a} - {b}|{a} - {b}|{a} minus {b}|{a}-{b}|{a} take away {b}|{a} less {b}|the difference {a} - {b}"
    "|the result of {a} - {b}|the result of {a} minus {b}|{a} − {b}"
)[0]
FRAMES = wordings.split(
    "What is {x}?|What is {x}?|What's {x}?|How much is {x}?|Calculate {x}.|Compute {x}|Work out {x}.|Tell me {x}."
    "|{x}|{x} = ?|{x} =|{x}=|{x}?|{x} equals?|{x} is|Can you compute {x}?|Could you calculate {x}?|Solve {x}."
    "|Please calculate {x}.|Do you know what {x} is?|I need {x}.|What does {x} give?|What do you get for {x}?"
)[0]
OTHER_SUMS = wordings.split(
    "Add {a} and {b}.|Please add {a} and {b}.|What do you get when you add {a} and {b}?|Add {b} to {a}."
    "|I have {a} and get {b} more. How many now?|Can you add {a} and {b}?"
)[0]
OTHER_DIFFERENCES = wordings.split(
    "Subtract {b} from {a}.|What do you get when you take {b} from {a}?|Take {b} away from {a}."
    "|Please subtract {b} from {a}.|I have {a} and give away {b}. How many are left?|Take {b} from {a}."
    "|Can you subtract {b} from {a}?|What is left when {b} is taken from {a}?"
)[0]
PHRASES = {"+": (SUMS, OTHER_SUMS), "-": (DIFFERENCES, OTHER_DIFFERENCES)}
DIFFERENCE_SHARE = 0.64  # they are harder: half of them are negative
LIMITS, LIMIT_SHARES = (10, 20, LIMIT), (0.25, 0.10, 0.65)
"""Operands are drawn below one of these: of uniform ones one pair in a hundred has two single digits."""
SMALL = 13
USUAL = {
    "+": wordings.split(
        "What is {a} + {b}?|What's {a} + {b}?|what is {a}+{b}|{a} + {b}|{a}+{b}=|{a} + {b} = ?|What is {a} plus {b}?"
        "|How much is {a} + {b}?"
    )[0],
    "-": wordings.split(
        "What is {a} - {b}?|What's {a} - {b}?|what is {a}-{b}|{a} - {b}|{a}-{b}=|{a} - {b} = ?|What is {a} minus {b}?"
        "|How much is {a} - {b}?"
    )[0],
}
"""How people first ask, the plainest first: every pair of operands below `SMALL` is evaluated in each of these."""


@cache
def held_out(sign: str) -> frozenset[tuple[int, int]]:
    """The pairs that no training text may contain; one fixed draw per sign, without pairs of small operands.

    The small pairs are the ones that users ask first. They are learned by heart, and each is evaluated.
    """
    draw = random.Random(f"held-out {sign}")
    pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    return frozenset(pair for pair in draw.sample(pairs, int(len(pairs) * HELD_OUT_SHARE)) if max(pair) >= SMALL)


def is_held_out(problem: Problem) -> bool:
    """True if a problem belongs to the evaluation."""
    a, sign, b = problem
    return (a, b) in held_out(sign)


def solve(problem: Problem) -> str:
    """The full answer line."""
    a, sign, b = problem
    return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"


def draw_operand(rng: random.Random) -> int:
    """A number of any size: first how large it may be, then which."""
    return rng.randrange(rng.choices(LIMITS, LIMIT_SHARES)[0])


def draw_problem(rng: random.Random) -> Problem:
    """A problem from the training part; among the held-out ones operands are uniform."""
    while True:
        sign = "-" if rng.random() < DIFFERENCE_SHARE else "+"
        a, b = draw_operand(rng), draw_operand(rng)
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
    phrases, others = PHRASES[sign]
    wording = rng.choice(others)
    if rng.random() < 0.75:
        wording = rng.choice(FRAMES).replace("{x}", rng.choice(phrases))
    text = wording.format(a=a, b=b)
    return text[0].upper() + text[1:]


def exchange(rng: random.Random) -> Exchange:
    """A question and its answer."""
    problem = draw_problem(rng)
    return Exchange(wordings.dress(rng, question(rng, problem)), f"{solve(problem)}.", 2.0)


def drill(rng: random.Random) -> list[Piece]:
    """Lines of worked problems without any chat: the densest way to show many pairs."""
    pieces: list[Piece] = []
    for _ in range(rng.randint(6, 24)):
        left, right = solve(draw_problem(rng)).split(" =")
        pieces += [Piece(f"{left} =", 0.0), Piece(right, 2.0), Piece("\n", 0.1)]
    return pieces


def evaluation(rng: random.Random, sign: str, count: int) -> list[tuple[str, str]]:
    """Held-out questions with the answers expected."""
    pairs = sorted(held_out(sign))
    pairs = rng.sample(pairs, min(count, len(pairs)))
    problems: list[Problem] = [(a, sign, b) for a, b in pairs]
    return [(question(rng, problem), f"{solve(problem)}.") for problem in problems]


def small_problems(sign: str) -> list[Problem]:
    """Every pair of small operands."""
    return [(a, sign, b) for a in range(SMALL) for b in range(SMALL)]


def usual(problem: Problem) -> list[tuple[str, str]]:
    """A problem in each of the usual wordings, with the answer expected."""
    a, sign, b = problem
    return [(wording.format(a=a, b=b), f"{solve(problem)}.") for wording in USUAL[sign]]
