"""How likely a model finds the tokens of a text, and how that compares with another model on the same tokens."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

from troupellm import LLM, SamplingParams


class Scores(msgspec.Struct, frozen=True):
    """Of the tokens behind the first one of each window."""

    logprobs: list[float]
    best: list[int]
    """The likeliest token of each place."""


class Compared(msgspec.Struct, frozen=True):
    """A model beside the one of full precision, on the same tokens."""

    perplexity: float
    change: float
    """Of the perplexity, as a share of the other one's."""
    error: float
    """The standard error of the change, from the differences of the same tokens."""
    agreement: float
    """Share of the places with the same likeliest token."""


def windows(ids: Sequence[int], tokens: int, length: int) -> list[list[int]]:
    """The first `tokens` ids, cut into pieces of `length`."""
    chosen = list(ids[:tokens])
    return [chosen[start : start + length] for start in range(0, len(chosen), length)]


def scores(llm: LLM, pieces: Sequence[Sequence[int]]) -> Scores:
    """One prompt for each piece."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": list(piece)} for piece in pieces], params, use_tqdm=False)
    logprobs, best = [], []
    for piece, output in zip(pieces, outputs, strict=True):
        for token, entry in zip(piece[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert entry is not None
            logprobs.append(entry[token].logprob)
            best.append(min(entry, key=lambda one: entry[one].rank or 0))
    return Scores(logprobs, best)


def compared(model: Scores, full: Scores) -> Compared:
    losses = [there - here for here, there in zip(model.logprobs, full.logprobs, strict=True)]
    change = math.exp(fmean(losses)) - 1.0
    return Compared(
        perplexity=math.exp(-fmean(model.logprobs)),
        change=change,
        error=(1.0 + change) * stdev(losses) / math.sqrt(len(losses)),
        agreement=fmean(here == there for here, there in zip(model.best, full.best, strict=True)),
    )
