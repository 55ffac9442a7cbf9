"""`bench lora`: what adapters cost in decode steps, what loads cost running streams, and what they leave in memory."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import msgspec

from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.step.adapters import (
    ALL,
    MERGED,
    MODEL,
    ONE,
    SIDES,
    SLOTS,
    Shape,
    Steps,
    measure,
    write_adapter,
    write_merged,
)
from troupellm.load_tests.traffic.adapter_loads import MODEL_LEN, Gaps, Memory, gaps_beside_loads, memory_of_loads

EMPTY_TARGET, MANY_TARGET, ONE_TARGET = 0.98, 0.9, 0.95
"""Least ratios of tokens/s: with empty slots to the model alone, with all adapters to the same at `MANY_ROWS`, and with
one adapter to the checkpoint that it is merged into at `ONE_ROWS`."""
MANY_ROWS, ONE_ROWS = 32, 8
GAP_TARGET = 1.5
"""Most of a stream's gap beside loads, over the same without."""
MEMORY_TARGET = 1.02
"""Most of the memory after all loads, over that of the model, full slots and full host memory."""
HOST_ADAPTERS = 12
"""That host memory holds, unless there are more slots. Twice as many are there, so that each load reads one."""


class Verdict(msgspec.Struct, frozen=True):
    what: str
    value: float
    wanted: str
    kept: bool


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a bar is missed."""
    content: dict[str, Any] = {"arguments": {name: value for name, value in vars(args).items() if name != "func"}}
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="troupe-lora-") as name:
        model = write_random_model(Path(name) / "model", SHAPES[args.model])
        adapters = [
            write_adapter(Path(name) / str(seed), model, args.rank, seed) for seed in range(2 * _host_adapters(args))
        ]
        if "steps" in args.parts:
            steps = _steps(args, model, adapters)
            content["steps"] = [msgspec.structs.asdict(found) for found in steps]
            verdicts += _step_verdicts(steps)
        for part in ("gaps", "memory"):
            if part in args.parts:
                found = anyio.run(_beside_loads, args, model, adapters, part)
                content[part] = msgspec.structs.asdict(found)
                verdicts.append(_gap_verdict(found) if isinstance(found, Gaps) else _memory_verdict(found))
    print(_table(verdicts))
    if args.result_json:
        content["verdicts"] = [msgspec.structs.asdict(verdict) for verdict in verdicts]
        Path(args.result_json).write_text(json.dumps(content), encoding="utf-8")
    return 0 if all(verdict.kept for verdict in verdicts) else 1


def _host_adapters(args: argparse.Namespace) -> int:
    return max(HOST_ADAPTERS, int(args.adapters))


def _steps(args: argparse.Namespace, model: Path, adapters: Sequence[Path]) -> list[Steps]:
    merged = write_merged(model.with_name("merged"), model, adapters[0])
    shape = Shape(
        context=args.context, steps=args.steps, rounds=args.rounds, num_threads=args.num_threads, rank=args.rank
    )
    found = measure(model, merged, adapters[: args.adapters], args.batches, shape)
    print(f"{'rows':>5}  {'side':<22}{'tokens/s':>10}{'of the model alone':>20}")
    for steps in found:
        for side in SIDES:
            print(f"{steps.rows:>5}  {side:<22}{steps.rate(side):>10.1f}{steps.ratio(side, MODEL):>20.3f}")
    return found


async def _beside_loads(args: argparse.Namespace, model: Path, adapters: Sequence[Path], part: str) -> Gaps | Memory:
    from troupellm.actors.engine.engine import Engine

    settings = {"device": "cpu", "num_threads": args.num_threads, "max_model_len": MODEL_LEN, "flush_interval": 0.0}
    lora = {"max_lora_rank": args.rank, "max_loras": args.adapters, "max_cpu_loras": _host_adapters(args)}
    async with Engine(model, enable_lora=True, **settings, **lora) as engine:
        if part == "memory":
            return await memory_of_loads(engine, adapters, loads=args.memory_loads)
        return await gaps_beside_loads(
            engine, adapters, streams=args.streams, rounds=args.rounds, loads=max(1, args.loads // args.rounds)
        )


def _step_verdicts(steps: Sequence[Steps]) -> list[Verdict]:
    verdicts = [_at_least(found, SLOTS, MODEL, EMPTY_TARGET) for found in steps]
    verdicts += [_at_least(found, ALL, MODEL, MANY_TARGET) for found in steps if found.rows == MANY_ROWS]
    return verdicts + [_at_least(found, ONE, MERGED, ONE_TARGET) for found in steps if found.rows == ONE_ROWS]


def _at_least(steps: Steps, side: str, other: str, target: float) -> Verdict:
    ratio = steps.ratio(side, other)
    return Verdict(f"{steps.rows} rows, {side}, over {other}", ratio, f">= {target}", ratio >= target)


def _gap_verdict(gaps: Gaps) -> Verdict:
    ratio = median(loading / quiet for loading, quiet in zip(gaps.loading, gaps.quiet, strict=True))
    what = f"p99 gap of streams beside {gaps.loads} loads, {median(gaps.loading) * 1e3:.1f} ms, over quiet"
    return Verdict(what, ratio, f"<= {GAP_TARGET}", ratio <= GAP_TARGET)


def _memory_verdict(memory: Memory) -> Verdict:
    ratio = memory.after / memory.expected
    what = f"memory after {memory.loads} loads, {memory.after / 1e6:.0f} MB, over model, slots and host memory"
    return Verdict(what, ratio, f"<= {MEMORY_TARGET}", ratio <= MEMORY_TARGET)


def _table(verdicts: Sequence[Verdict]) -> str:
    width = max((len(verdict.what) for verdict in verdicts), default=0)
    return "\n".join(
        f"{verdict.what:{width}}  {verdict.value:8.3f}  {verdict.wanted:>8}  {'kept' if verdict.kept else 'MISSED'}"
        for verdict in verdicts
    )
