"""A batch of prompts of many lengths that come one after the other."""

from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt


def check_ragged_batch(pair: Pair) -> None:
    """Six prompts that come one after the other: their chunks share steps with the tokens that others generate."""
    lengths = {0: 3, 1: 33, 2: 17, 3: 61, 4: 16, 5: 1}
    driver = Driver(pair.runner())
    for row, length in lengths.items():
        driver.submit(row, make_prompt(length, seed=row))
    arrivals = {0: 0, 1: 0, 2: 1, 3: 3, 4: 4, 5: 6}
    step = 0
    while any(driver.generated(row) < 10 for row in lengths):
        present = [row for row in lengths if arrivals[row] <= step and driver.generated(row) < 10]
        driver.run({row: min(20, len(driver.tokens[row]) - driver.done[row]) for row in present})
        step += 1
    for row, length in lengths.items():
        pair.check(make_prompt(length, seed=row), driver.answer(row))
