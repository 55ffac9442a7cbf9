"""The requests: random prompts of mixed lengths and the exact number of tokens each wants back."""

import random

import msgspec


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
