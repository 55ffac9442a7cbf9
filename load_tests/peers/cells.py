"""The measurement: cells of a table, the rates found in them, and how we compare."""

import random
from collections.abc import Callable, Sequence
from math import exp, log
from statistics import median

import msgspec

OURS = "troupellm"
LEAST_DECODE, LEAST_PREFILL, LEAST_MEAN, LEAST_RIVAL = 0.9, 0.95, 1.0, 1.3
"""Wanted against the best peer in every cell, and in the geometric mean; and against each rival in the mean."""
RIVALS = ("vllm", "llama")
PEERS = ("openvino", "vllm", "llama", "transformers")
"""All of them must have a number before a comparison with the best is made."""
LEAST_SAME = 0.5
"""Of the tokens at fp32, where all compute the same model: rounding parts answers late, a wrong model at once."""


class Cell(msgspec.Struct, frozen=True):
    """`sequences` prompts of `input_len` tokens at once, each answered with `output_len` tokens."""

    name: str
    sequences: int
    input_len: int
    output_len: int

    @property
    def counted_tokens(self) -> int:
        """Decoding counts what comes out, prefill what goes in."""
        return self.sequences * (self.input_len if self.name == "prefill" else self.output_len)

    @property
    def room(self) -> int:
        """That each sequence needs in a cache, and a little more."""
        return -(-(self.input_len + self.output_len + 1) // 64) * 64

    def prompts(self, vocab_size: int, seed: str) -> list[list[int]]:
        """Other ones for each seed, so that no cache of prefixes helps."""
        source = random.Random(f"{seed} {self.name} {self.sequences}")
        return [source.choices(range(1, vocab_size), k=self.input_len) for _ in range(self.sequences)]


class Measured(msgspec.Struct):
    """One contestant in one cell."""

    seconds: list[float]
    answers: list[list[int]]
    """Of the last round."""


class Comparison(msgspec.Struct, frozen=True):
    """One cell, all contestants."""

    config: str
    precision: str
    cell: Cell
    rates: dict[str, float]
    """Tokens per second, of the median time."""
    spread: dict[str, tuple[float, float]]
    same_tokens: dict[str, float]
    """Share of the tokens that are ours, up to each answer's first difference."""

    @property
    def differing(self) -> dict[str, float]:
        """Whose tokens are not all ours, and how many are."""
        return {name: share for name, share in self.same_tokens.items() if share < 1.0}

    @property
    def best(self) -> str | None:
        peers = {name: rate for name, rate in self.rates.items() if name != OURS}
        return max(peers, key=peers.__getitem__) if peers else None

    def ratio(self, other: str | None) -> float | None:
        """How many times as fast as another one we are."""
        if other is None or OURS not in self.rates or other not in self.rates:
            return None
        return self.rates[OURS] / self.rates[other]


def compare(config: str, precision: str, cell: Cell, measured: dict[str, Measured]) -> Comparison:
    tokens = cell.counted_tokens
    ours = measured[OURS].answers if OURS in measured else None
    return Comparison(
        config=config,
        precision=precision,
        cell=cell,
        rates={name: tokens / median(found.seconds) for name, found in measured.items()},
        spread={name: (tokens / max(found.seconds), tokens / min(found.seconds)) for name, found in measured.items()},
        same_tokens={
            name: _same(found.answers, ours) for name, found in measured.items() if ours is not None and name != OURS
        },
    )


def _same(theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> float:
    same = total = 0
    for other, mine in zip(theirs, ours, strict=True):
        total += len(mine)
        differing = (place for place, (one, two) in enumerate(zip(other, mine, strict=True)) if one != two)
        same += next(differing, len(mine))
    return same / total


def geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


class Verdict(msgspec.Struct, frozen=True):
    what: str
    found: float
    wanted: float
    peers: tuple[str, ...]
    """The peers of the comparison, each in at least one cell."""
    cells: int
    """That it is over."""
    missing: tuple[str, ...]
    """The peers without a number in one of its cells."""

    @property
    def kept(self) -> bool:
        """Nothing is kept while numbers are missing."""
        return self.found >= self.wanted and not self.missing


def judge(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """The goals, per precision over all configurations: worst cells, and means against the best and the rivals."""
    verdicts: list[Verdict] = []
    for precision in dict.fromkeys(comparison.precision for comparison in comparisons):
        chosen = [comparison for comparison in comparisons if comparison.precision == precision]
        decode = [one for one in chosen if one.cell.name != "prefill"]
        prefill = [one for one in chosen if one.cell.name == "prefill"]
        for what, cells, judged, wanted in (
            ("worst decoding cell", decode, min, LEAST_DECODE),
            ("worst prefill cell", prefill, min, LEAST_PREFILL),
            ("geometric mean", chosen, geometric_mean, LEAST_MEAN),
        ):
            verdicts += _verdict(f"{precision}: {what} / best peer", cells, PEERS, None, judged, wanted)
        for rival in RIVALS:
            what = f"{precision}: geometric mean / {rival}"
            verdicts += _verdict(what, chosen, (rival,), rival, geometric_mean, LEAST_RIVAL)
    return verdicts


def _verdict(
    what: str,
    chosen: Sequence[Comparison],
    peers: Sequence[str],
    other: str | None,
    judged: Callable[[list[float]], float],
    wanted: float,
) -> list[Verdict]:
    """Of our ratios to `other`, or to the best where it is None; nothing where there are none."""
    ratios = [ratio for one in chosen if (ratio := one.ratio(other or one.best)) is not None]
    if not ratios:
        return []
    there = tuple(name for name in peers if any(name in one.rates for one in chosen))
    missing = tuple(name for name in (OURS, *peers) if any(name not in one.rates for one in chosen))
    return [Verdict(what, judged(ratios), wanted, there, len(ratios), missing)]
