"""One of the questions of a round."""

import msgspec

MOST_TOKENS = 128


class Question(msgspec.Struct, frozen=True):
    prompt: str | list[int]
    max_tokens: int = MOST_TOKENS
    ignore_eos: bool = False
