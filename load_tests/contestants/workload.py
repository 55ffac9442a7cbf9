"""Work of a comparison: random prompts with the exact number of tokens each wants back, turns and cores."""

import os
import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    prompt: list[int]
    output_len: int


def mixed(
    count: int, input_len: tuple[int, int], output_len: tuple[int, int], *, vocab_size: int, seed: int
) -> list[Request]:
    """Lengths uniform within both borders, in random order, the same for the same seed."""
    generator = random.Random(seed)
    return [
        Request(
            prompt=generator.choices(range(vocab_size), k=generator.randint(*input_len)),
            output_len=generator.randint(*output_len),
        )
        for _ in range(count)
    ]


def turns(contestants: Sequence[T], number: int) -> list[T]:
    """The order of a round: another one begins each time, so that none always follows the same one."""
    first = number % max(1, len(contestants))
    return [*contestants[first:], *contestants[:first]]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
