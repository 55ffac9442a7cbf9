"""`bench offline`: the engine beside its peers, each in a process of its own, on the same random model and prompts.

All contestants of a configuration and a precision are loaded; in every round each has its turn in each cell, while the
others are stopped. Rates are of median times.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from troupellm.load_tests.contestants.workload import turns
from troupellm.load_tests.peers import table
from troupellm.load_tests.peers.cells import OURS, Cell, Comparison, Measured, compare, judge
from troupellm.load_tests.peers.checkpoints import Start, model_for
from troupellm.load_tests.peers.environments import SIDES, environment_of, link_package, processor, python_of
from troupellm.load_tests.peers.process import Contestant, ContestantError, unwinding
from troupellm.load_tests.random_model import SHAPES

MAKE_SECONDS = 1200.0
ANSWER_SECONDS = 900.0
WARM_UP_TOKENS = 8


def run(args: argparse.Namespace) -> int:
    """0 when all that was asked for ran, 1 when a contestant failed."""
    threads = args.num_threads or len(os.sched_getaffinity(0))
    cells = [Cell(f"{count} seq", count, args.input_len, args.output_len) for count in args.sequences]
    if args.prefill_len:
        cells.append(Cell("prefill", 1, args.prefill_len, 1))
    with unwinding(), ExitStack() as stack:
        work = Path(args.work_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="troupe-offline-")))
        work.mkdir(parents=True, exist_ok=True)
        work = work.absolute()
        bench = Bench(args, work, threads, RandomModels(work))
        print(f"{processor()}, {threads} threads; prompts of {args.input_len}, answers of {args.output_len} tokens")
        for config in args.configs:
            for precision in args.precisions:
                bench.compete(config, precision, cells)
    print("\n" + table.means(bench.comparisons, args.contestants))
    print("\n" + table.judgement(judge(bench.comparisons)))
    print("\n" + "; ".join(f"{name}: {_spelt(found)}" for name, found in bench.versions.items()))
    for failure in bench.failures:
        print(f"bench offline: {failure}", file=sys.stderr)
    return 1 if bench.failures else 0


class Models(Protocol):
    """The models of a benchmark."""

    def path(self, contestant: str, precision: str, config: str, start: Start) -> Path:
        """The model in the form that a contestant reads.

        Raises:
            ContestantError: it cannot be made.
        """

    def vocab_size(self, config: str) -> int:
        """From how many token ids prompts are drawn."""


class RandomModels:
    """Of random weights, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, contestant: str, precision: str, config: str, start: Start) -> Path:
        """As `Models.path`."""
        return model_for(contestant, precision, config, self._folder, start)

    def vocab_size(self, config: str) -> int:
        """As `Models.vocab_size`."""
        return SHAPES[config].vocab_size


class Bench:
    """The measurements so far."""

    def __init__(self, args: argparse.Namespace, work: Path, threads: int, models: Models, **own: Any) -> None:
        """
        Args:
            own: further settings of our side.
        """
        self._args, self._work, self._threads, self._models, self._own = args, work, threads, models, own
        self._link = link_package(work / "import")
        self.comparisons: list[Comparison] = []
        self.versions: dict[str, dict[str, str]] = {}
        self.failures: list[str] = []

    def compete(self, config: str, precision: str, cells: Sequence[Cell]) -> None:
        """Every cell of a configuration and a precision, with the contestants that can."""
        contestants: dict[str, Contestant] = {}
        try:
            for name in dict.fromkeys(self._args.contestants):
                if contestant := self._made(name, config, precision, cells):
                    contestants[name] = contestant
            print("\n" + table.heading(self._args.contestants), flush=True)
            for cell in cells:
                measured = self._measure(cell, config, contestants)
                self.comparisons.append(compare(config, precision, cell, measured))
                print(table.line(self.comparisons[-1], self._args.contestants), flush=True)
                self._write()
        finally:
            for contestant in contestants.values():
                contestant.close()

    def _start(self, name: str) -> Contestant:
        python = python_of(name, Path(self._args.peers_dir))
        if python is None:
            raise ContestantError(f"{name}: not installed in {self._args.peers_dir}; `make peers` does that")
        command = [
            str(python),
            "-m",
            "troupellm.load_tests.peers.sides.loop",
            f"troupellm.load_tests.peers.sides.{SIDES[name]}",
        ]
        environment = environment_of(name, python, self._link, self._threads)
        return Contestant(name, command, environment=environment, log=self._work / f"{name}.log")

    def _made(self, name: str, config: str, precision: str, cells: Sequence[Cell]) -> Contestant | None:
        """A contestant that has loaded its model, and is stopped; None where it cannot, which is noted."""
        contestant = None
        try:
            model = self._models.path(name, precision, config, self._start)
            contestant = self._start(name)
            contestant.make(
                MAKE_SECONDS,
                model=str(model),
                precision=precision,
                threads=self._threads,
                sequences=max(cell.sequences for cell in cells),
                length=max(cell.room for cell in cells),
                tokens=max(cell.sequences * cell.room for cell in cells),
                **(self._own if name == OURS else {}),
            )
        except ContestantError as error:
            self.failures.append(f"{config} {precision}: {error}")
            if contestant is not None:
                contestant.close()
            return None
        except BaseException:
            if contestant is not None:
                contestant.close()
            raise
        contestant.freeze()
        self.versions[name] = contestant.versions
        return contestant

    def _measure(self, cell: Cell, config: str, contestants: dict[str, Contestant]) -> dict[str, Measured]:
        """Round 0 warms up and is short; then everybody has its turn in each, beginning with another one each time."""
        measured: dict[str, Measured] = {}
        prompts_of = partial(cell.prompts, self._models.vocab_size(config))
        for number in range(self._args.rounds + 1):
            prompts = prompts_of(f"{self._args.seed} {number}")
            output_len = cell.output_len if number else min(cell.output_len, WARM_UP_TOKENS)
            for name in turns(list(contestants), number):
                try:
                    with contestants[name].awake():
                        seconds, answers = contestants[name].answer(prompts, output_len, ANSWER_SECONDS)
                except ContestantError as error:
                    self.failures.append(f"{config} {cell.name}: {error}")
                    contestants.pop(name).close()
                    measured.pop(name, None)
                    continue
                if number:
                    found = measured.setdefault(name, Measured([], []))
                    found.seconds.append(seconds)
                    found.answers = answers
        return measured

    def _write(self) -> None:
        if not self._args.result_json:
            return
        content: dict[str, Any] = {
            "processor": processor(),
            "num_threads": self._threads,
            "rounds": self._args.rounds,
            "versions": self.versions,
            "cells": msgspec.to_builtins(self.comparisons),
            "judgement": [
                {**msgspec.to_builtins(verdict), "kept": verdict.kept} for verdict in judge(self.comparisons)
            ],
            "failures": self.failures,
        }
        Path(self._args.result_json).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _spelt(versions: dict[str, str]) -> str:
    return " ".join(f"{name} {number}" for name, number in versions.items())
