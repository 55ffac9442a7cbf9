"""`bench throughput`: the embedded engine beside `transformers`, same process, same requests, interleaved repeats."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import msgspec

from troupellm.load_tests.contestants.generation import (
    PAGE_SIZE,
    Contestant,
    ContinuousBatching,
    Reference,
    StaticBatches,
    Troupe,
)
from troupellm.load_tests.contestants.workload import Request, mixed, turns, usable_cores
from troupellm.load_tests.random_model import SHAPES, write_random_model

RATIOS = (
    ("troupellm", "generate", 2.5),
    ("troupellm", "continuous", 1.5),
    ("troupellm-one", "generate-one", 1.5),
)
"""The comparison and its goal."""


class Entry(msgspec.Struct):
    """A contestant on its requests, and what its runs gave."""

    contestant: Contestant
    requests: list[Request]
    seconds: list[float]
    answers: list[list[int]]

    @property
    def wanted_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @property
    def rates(self) -> list[float]:
        return [self.wanted_tokens / seconds for seconds in self.seconds]


def run(args: argparse.Namespace) -> int:
    needs_reference = any(name.startswith(("generate", "continuous")) for name in args.contestants)
    if needs_reference and find_spec("transformers") is None:
        print("bench throughput: transformers comes with the test tools (make test), or --contestants", file=sys.stderr)
        return 2
    shape = SHAPES[args.preset]
    threads = args.num_threads or usable_cores()
    print(f"random Llama of {shape.num_parameters / 1e6:.1f} M parameters, float32, {threads} threads", flush=True)
    with tempfile.TemporaryDirectory(prefix="troupe-throughput-") as name:
        folder = write_random_model(Path(name), shape, seed=args.seed)
        entries = _entries(args, folder, threads)
        anyio.run(_compete, entries, args.repeats, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    report = summarise(entries)
    print(table(report, judge=args.preset == "125m"))
    if args.result_json:
        content = {"preset": args.preset, "num_threads": threads, "repeats": args.repeats, **report}
        Path(args.result_json).write_text(json.dumps(content), encoding="utf-8")
    return 0


def _entries(args: argparse.Namespace, folder: Path, threads: int) -> dict[str, Entry]:
    """The wanted contestants. Both engines' caches hold every request whole, so neither preempts."""
    vocab_size = SHAPES[args.preset].vocab_size
    many = mixed(
        args.num_requests, tuple(args.input_len), tuple(args.output_len), vocab_size=vocab_size, seed=args.seed
    )
    one_lens = (args.one_input_len, args.one_input_len), (args.one_output_len, args.one_output_len)
    one = mixed(1, *one_lens, vocab_size=vocab_size, seed=args.seed + 1)
    reference = Reference(folder, num_threads=threads)
    blocks = max(_pages(many, PAGE_SIZE), _pages(one, PAGE_SIZE))
    troupe = Troupe(folder, num_threads=threads, num_blocks=blocks, max_num_seqs=max(1, len(many)))
    static = StaticBatches(reference, batch_size=args.batch_size)
    continuous = ContinuousBatching(
        reference,
        page_size=args.continuous_page_size,
        num_blocks=_pages(many, args.continuous_page_size),
        max_batch_tokens=args.continuous_batch_tokens,
    )
    known: dict[str, tuple[Contestant, list[Request]]] = {
        "troupellm": (troupe, many),
        "generate": (static, many),
        "continuous": (continuous, many),
        "troupellm-one": (troupe, one),
        "generate-one": (static, one),
    }
    return {name: Entry(*known[name], seconds=[], answers=[]) for name in known if name in args.contestants}


def _pages(requests: Sequence[Request], size: int) -> int:
    return sum((len(request.prompt) + request.output_len) // size + 2 for request in requests)


async def _compete(entries: dict[str, Entry], repeats: int) -> None:
    """One warm-up round that is not timed, then the rounds: every contestant once in each, another one first."""
    from tqdm import tqdm

    with tqdm(total=(repeats + 1) * len(entries), unit="run") as bar:
        for repeat in range(repeats + 1):
            for name, entry in turns(list(entries.items()), repeat):
                bar.set_description(name)
                seconds = await _turn(entry)
                if repeat:
                    entry.seconds.append(seconds)
                bar.update()


async def _turn(entry: Entry) -> float:
    """Seconds of one run, after checking that every answer has its wanted length."""
    async with AsyncExitStack() as turn:
        await entry.contestant.start(turn)
        begin = time.perf_counter()
        entry.answers = await entry.contestant.answer(entry.requests)
        seconds = time.perf_counter() - begin
    short = [len(answer) for answer in entry.answers]
    if short != [request.output_len for request in entry.requests]:
        raise RuntimeError("an answer has not the wanted number of tokens, so the runs cannot be compared")
    return seconds


def summarise(entries: dict[str, Entry]) -> dict[str, Any]:
    """Medians, spread, ratios, and the share of answers equal to `transformers.generate`'s, token for token."""
    contestants = {
        name: {
            "requests": len(entry.requests),
            "prompt_tokens": sum(len(request.prompt) for request in entry.requests),
            "output_tokens": entry.wanted_tokens,
            "median_tokens_per_s": median(entry.rates),
            "min_tokens_per_s": min(entry.rates),
            "max_tokens_per_s": max(entry.rates),
            "seconds": entry.seconds,
        }
        for name, entry in entries.items()
    }
    ratios = {
        f"{ours} / {theirs}": {"ratio": median(entries[ours].rates) / median(entries[theirs].rates), "wanted": wanted}
        for ours, theirs, wanted in RATIOS
        if ours in entries and theirs in entries
    }
    same = {
        name: _share_equal(entries[name].answers, entries[reference].answers)
        for name, reference in (
            ("troupellm", "generate"),
            ("continuous", "generate"),
            ("troupellm-one", "generate-one"),
        )
        if name in entries and reference in entries
    }
    return {"contestants": contestants, "ratios": ratios, "same_tokens_as_generate": same}


def _share_equal(ours: list[list[int]], theirs: list[list[int]]) -> float:
    return sum(mine == other for mine, other in zip(ours, theirs, strict=True)) / len(ours)


def table(report: dict[str, Any], *, judge: bool = True) -> str:
    """`judge` says whether each ratio is what we want, which only means something for a model of real size."""
    lines = [f"{'':<16}{'requests':>9}{'output tokens':>15}{'tokens/s':>11}{'least':>9}{'most':>9}{'same tokens':>13}"]
    for name, numbers in report["contestants"].items():
        same = report["same_tokens_as_generate"].get(name)
        lines.append(
            f"{name:<16}{numbers['requests']:>9}{numbers['output_tokens']:>15}{numbers['median_tokens_per_s']:>11.1f}"
            f"{numbers['min_tokens_per_s']:>9.1f}{numbers['max_tokens_per_s']:>9.1f}"
            + (f"{same:>13.0%}" if same is not None else "")
        )
    for name, numbers in report["ratios"].items():
        verdict = "kept" if numbers["ratio"] >= numbers["wanted"] else "MISSED"
        wanted = f"   wanted {numbers['wanted']:.1f} x   {verdict}" if judge else ""
        lines.append(f"{name:<32}{numbers['ratio']:>8.2f} x{wanted}")
    return "\n".join(lines)
