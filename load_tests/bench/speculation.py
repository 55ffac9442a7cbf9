"""`bench speculation`: what drafts bring, beside the same engine without, in alternating rounds of one run."""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import msgspec

from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.speculation.agent import agent_turns
from troupellm.load_tests.speculation.arms import Arms, Measured
from troupellm.load_tests.speculation.question import MOST_TOKENS, Question
from troupellm.load_tests.speculation.table import HEADING, Verdict, judgement, line
from troupellm.load_tests.speculation.workloads import (
    RANDOM_PROMPT,
    copying,
    held_out,
    mixed,
    random_tokens,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12},
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
    "medusa": {"method": "medusa", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": "builtin", "num_speculative_tokens": 4},
}
LEAST_RATIO = {"ngram": 2.0, "suffix": 2.0}
LEAST_ACCEPTED = {"eagle": 2.5, "medusa": 2.0, "draft_model": 2.0}
LEAST_SYNTHETIC = {"fp32": 1.6, "int8": 1.9}
LEAST_SWEEP = 0.97
SYNTHETIC_DRAFTS = 4
PROMPT_ROOM = 1024
LEAST_SWEPT, SWEPT_PER_SEQUENCE = 16, 6
"""Answers of a round of `sweep`, so that most of its time the batch is full."""


def run(args: argparse.Namespace) -> int:
    """0 when all was measured and no answer differs, 1 otherwise."""
    bench = Bench(args)
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    print(HEADING, flush=True)
    for part in args.parts:
        anyio.run(bench.measure, part, backend_options=backend)
        bench.write()
    print("\n" + judgement(bench.verdicts))
    return 1 if any(verdict.differing for verdict in bench.verdicts) else 0


class Bench:
    """The measurements so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._found: list[dict[str, Any]] = []
        self.verdicts: list[Verdict] = []

    async def measure(self, part: str) -> None:
        match part:
            case "ngram":
                await self._speed(part, "copying", copying(self._args.prompts))
            case "suffix":
                other_values = partial(agent_turns, self._args.prompts)
                await self._speed(part, "agent, other values", other_values)
                await self._speed(part, "agent, same turns", agent_turns(self._args.prompts, 0))
                await self._fixed(part, "agent, all drafts", other_values)
            case "eagle" | "medusa" | "draft_model":
                await self._acceptance(part)
            case "synthetic":
                for precision in self._args.precisions:
                    await self._synthetic(precision)
            case "sweep":
                for method in self._args.sweep_methods:
                    await self._sweep(method)
            case _:
                raise ValueError(part)

    async def _speed(
        self, part: str, workload: str, questions: list[Question] | Callable[[int], list[Question]]
    ) -> None:
        async with self._arms(SETTINGS[part]) as arms:
            found = await arms.measure(workload, questions, rounds=self._args.rounds)
        self._keep(part, found)
        accepted = f"acceptance length {found.acceptance_length:.2f}"
        self._judge(f"{part}, {workload}, {accepted}: tokens/s with / without", found.ratio, LEAST_RATIO[part], found)

    async def _fixed(self, part: str, workload: str, questions: Callable[[int], list[Question]]) -> None:
        """The accepted tokens with the most drafts always, whether they pay or not."""
        async with self._arms(SETTINGS[part] | {"adaptive": False}) as arms:
            self._keep(part, await arms.measure(workload, questions, rounds=self._args.rounds))

    async def _acceptance(self, part: str) -> None:
        """The length is fixed, so that what counts is what the drafter knows."""
        kinds = held_out(self._args.prompts)
        total = Measured("held out, all kinds", part, 1, [], [])
        async with self._arms(SETTINGS[part] | {"adaptive": False}) as arms:
            for kind, questions in kinds.items():
                found = await arms.measure(kind, questions, rounds=1)
                self._keep(part, found)
                total.plain += found.plain
                total.drafting += found.drafting
        self._keep(part, total)
        self._judge(
            f"{part}, held-out prompts: mean acceptance length", total.acceptance_length, LEAST_ACCEPTED[part], total
        )
        async with self._arms(SETTINGS[part]) as arms:
            questions = [question for group in kinds.values() for question in group]
            self._keep(part, await arms.measure("adaptive length", questions, rounds=self._args.rounds))

    async def _synthetic(self, precision: str) -> None:
        """Random drafts that are kept by lot: the answers are not the model's."""
        settings = {
            "method": "ngram",
            "num_speculative_tokens": SYNTHETIC_DRAFTS,
            "adaptive": False,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": self._args.synthetic_length,
        }
        name, length = self._args.config, self._args.output_len
        questions = random_tokens(1, length, SHAPES[name].vocab_size)
        with _random_model(name) as folder:
            quantization = "int8" if precision == "int8" else None
            async with self._arms(settings, folder, longest=RANDOM_PROMPT + length, quantization=quantization) as arms:
                found = await arms.measure(f"{name} {precision}", questions, rounds=self._args.rounds)
        self._keep("synthetic", found, compared=False)
        self._judge(
            f"{name} {precision}, acceptance length {found.acceptance_length:.2f}, T({SYNTHETIC_DRAFTS + 1})/T(1) "
            f"{found.step_ratio:.2f}: with / without",
            found.ratio,
            LEAST_SYNTHETIC[precision],
            None,
        )

    async def _sweep(self, method: str) -> None:
        for batch in self._args.batches:
            questions = mixed(max(LEAST_SWEPT, SWEPT_PER_SEQUENCE * batch), self._args.output_len)
            async with self._arms(SETTINGS[method], batch=batch) as arms:
                found = await arms.measure("all kinds", questions, rounds=self._args.rounds, batch=batch)
            self._keep(f"sweep {method}"[:12], found)
            self._judge(f"{method}, {batch} sequences: tokens/s with / without", found.ratio, LEAST_SWEEP, found)

    def _arms(
        self,
        speculative: dict[str, Any],
        folder: Path | None = None,
        *,
        batch: int = 1,
        longest: int = PROMPT_ROOM + MOST_TOKENS,
        quantization: str | None = None,
    ) -> Arms:
        return Arms(
            folder,
            speculative,
            batch=batch,
            longest=longest,
            threads=self._args.num_threads,
            embedded=self._args.embedded,
            quantization=quantization,
        )

    def _keep(self, part: str, found: Measured, *, compared: bool = True) -> None:
        print(line(part, found, compared=compared), flush=True)
        rounds = {
            side: [
                {key: value for key, value in msgspec.to_builtins(each).items() if key != "answers"} for each in listed
            ]
            for side, listed in (("off", found.plain), ("on", found.drafting))
        }
        off, on = found.rates
        self._found.append(
            {
                "part": part,
                "workload": found.name,
                "method": found.method,
                "batch": found.batch,
                "tokens_per_s": {"off": off, "on": on},
                "ratio": found.ratio,
                "step_ratio": found.step_ratio,
                "acceptance_length": found.acceptance_length,
                "differing_answers": found.differing if compared else None,
                "rounds": rounds,
            }
        )

    def _judge(self, what: str, value: float, wanted: float, compared: Measured | None) -> None:
        self.verdicts.append(Verdict(what, value, wanted, 0 if compared is None else compared.differing))

    def write(self) -> None:
        if not self._args.result_json:
            return
        content = {
            "num_threads": self._args.num_threads or len(os.sched_getaffinity(0)),
            "measured": self._found,
            "judgement": [{**msgspec.to_builtins(each), "kept": each.kept} for each in self.verdicts],
        }
        Path(self._args.result_json).write_text(json.dumps(content, indent=1), encoding="utf-8")


@contextmanager
def _random_model(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="troupe-speculation-") as directory:
        yield write_random_model(Path(directory) / "model", SHAPES[name])
