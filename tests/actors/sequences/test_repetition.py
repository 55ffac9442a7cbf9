from array import array

import pytest

from troupellm.actors.sequences.parts import Repetition
from troupellm.protocol.params.sampling_checks import RepetitionDetection


def first_end(generated, prompt=(), **wanted):
    """After how many generated tokens the end is called."""
    watch = Repetition(RepetitionDetection(**wanted), array("i", prompt), len(prompt))
    tokens = array("i", prompt)
    for count, token in enumerate(generated, 1):
        tokens.append(token)
        if watch.follow(tokens, len(prompt)):
            return count
    return None


def naive_end(generated, *, max_pattern_size, min_pattern_size=1, min_count=2):
    for count in range(1, len(generated) + 1):
        for size in range(min_pattern_size, max_pattern_size + 1):
            tail = generated[:count][-size * min_count :]
            if len(tail) == size * min_count and tail == tail[:size] * min_count:
                return count
    return None


@pytest.mark.parametrize("seed", range(40))
def test_a_repetition_ends_where_a_plain_search_finds_it(seed):
    import random

    rng = random.Random(seed)
    generated = [rng.randrange(3) for _ in range(120)]
    least = rng.randrange(1, 4)
    wanted = {"min_pattern_size": least, "max_pattern_size": least + rng.randrange(5), "min_count": rng.randrange(2, 6)}
    assert first_end(generated, **wanted) == naive_end(generated, **wanted)


def test_the_prompt_does_not_count():
    assert first_end([1, 2, 1, 2], prompt=[1, 2, 1, 2], max_pattern_size=2, min_pattern_size=2) == 4


def test_a_text_without_repetition_is_not_ended():
    assert first_end(list(range(500)), max_pattern_size=256) is None
