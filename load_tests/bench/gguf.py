"""`bench gguf`: GGUF files in our engine beside llama.cpp, each in a process of its own, on the same file and prompts.

The contestants of a file are loaded together; in every round each has its turn in each cell, while the other one is
stopped. Rates are of median times. Without llama.cpp's environment (`make peers`) our own rates are printed alone.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from troupellm.load_tests.bench.offline import Bench
from troupellm.load_tests.peers import table
from troupellm.load_tests.peers.cells import OURS, Cell, Comparison, Verdict, geometric_mean
from troupellm.load_tests.peers.checkpoints import GGUF, Start, plain_model, written
from troupellm.load_tests.peers.environments import processor, python_of
from troupellm.load_tests.peers.process import ContestantError, unwinding
from troupellm.load_tests.random_model import SHAPES

LEAST_CELL, LEAST_DECODE, LEAST_PREFILL = 1.0, 1.1, 1.2
"""Wanted against llama.cpp: in every cell, and in the geometric means of decoding and of prefill cells."""
STORED = "file"
"""The type of a file that was there."""


class GgufModels:
    """Random models as GGUF files of any type, and files that are there."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder, self.files = folder, {Path(file).stem: Path(file).absolute() for file in files}

    def path(self, contestant: str, precision: str, config: str, start: Start) -> Path:
        """As `Models.path`; both contestants read the same file."""
        if precision == STORED:
            return self.files[config]
        source = plain_model(config, self._folder)

        def write(target: Path) -> None:
            try:
                from troupellm.load_tests.peers.sides.gguf_file import write_gguf

                write_gguf(str(source), str(target / GGUF), precision)
            except ModuleNotFoundError as error:
                raise ContestantError(f"{error}; `make test` installs it") from None

        return written(self._folder / config / f"gguf-{precision}", write) / GGUF

    def vocab_size(self, config: str) -> int:
        """As `Models.vocab_size`; of a file that is there, those of one byte or so, which every vocabulary has."""
        return 256 if config in self.files else SHAPES[config].vocab_size


def run(args: argparse.Namespace) -> int:
    """0 when all that could run did, 1 when a contestant failed."""
    threads = args.num_threads or len(os.sched_getaffinity(0))
    cells = [Cell(f"{count} seq", count, args.input_len, args.output_len) for count in args.sequences]
    if args.prefill_len:
        cells.append(Cell("prefill", 1, args.prefill_len, 1))
    missing = [name for name in args.contestants if python_of(name, Path(args.peers_dir)) is None]
    args.contestants = [name for name in args.contestants if name not in missing]
    with unwinding(), ExitStack() as stack:
        work = Path(args.work_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="troupe-gguf-"))).absolute()
        work.mkdir(parents=True, exist_ok=True)
        models = GgufModels(work, args.files)
        bench = Bench(args, work, threads, models, gguf_inputs=args.gguf_inputs)
        print(f"{processor()}, {threads} threads; prompts of {args.input_len}, answers of {args.output_len} tokens")
        print(f"inputs of our products: {args.gguf_inputs}")
        for name in missing:
            print(f"{name} is not installed in {args.peers_dir}: `make peers` does that")
        for config in args.configs:
            for precision in args.types:
                bench.compete(config, precision, cells)
        for name in models.files:
            bench.compete(name, STORED, cells)
    print("\n" + table.means(bench.comparisons, args.contestants))
    print("\n" + table.judgement(judge(bench.comparisons)))
    for failure in bench.failures:
        print(f"bench gguf: {failure}", file=sys.stderr)
    return 1 if bench.failures else 0


def judge(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """The goals over all files, against llama.cpp; none where it has no numbers."""
    found = []
    decode = [one for one in comparisons if one.cell.name != "prefill"]
    prefill = [one for one in comparisons if one.cell.name == "prefill"]
    for what, chosen, judged, wanted in (
        ("worst cell", list(comparisons), min, LEAST_CELL),
        ("decoding, geometric mean", decode, geometric_mean, LEAST_DECODE),
        ("prefill, geometric mean", prefill, geometric_mean, LEAST_PREFILL),
    ):
        ratios = [ratio for one in chosen if (ratio := one.ratio("llama")) is not None]
        lacking = tuple(name for name in (OURS, "llama") if any(name not in one.rates for one in chosen))
        if ratios:
            found.append(Verdict(f"{what} / llama", judged(ratios), wanted, ("llama",), len(ratios), lacking))
    return found
