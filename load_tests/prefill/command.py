"""`bench prefill`: first tokens of prompts that come together, within the device's budget and all in one step."""

import argparse
import json
import os
import random
import tempfile
import time
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import anyio
import msgspec

from troupellm.load_tests.random_model import SHAPES, write_random_model

if TYPE_CHECKING:
    from troupellm.actors.engine import Engine

TTFT_TARGET = 0.65
"""Median time to first token within the budget, over that of one step for all."""
_CACHE_TOKENS_SPARE = 4096


class Side(msgspec.Struct):
    """One way of cutting prompts into steps; lists have an entry per round, seconds and tokens per second."""

    name: str
    budget: int
    first_token: list[float]
    """Medians over the requests of a round."""
    last_first_token: list[float]
    rate: list[float]
    """Prompt and generated tokens per second of a round."""


def run(args: argparse.Namespace) -> int:
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    with tempfile.TemporaryDirectory(prefix="troupe-prefill-") as name:
        folder = write_random_model(Path(name) / "model", SHAPES[args.preset])
        sides = anyio.run(_measure, args, folder, backend_options=backend)
    report = _report(sides)
    print(_text(args, sides, report))
    if args.result_json:
        content = {"sides": [msgspec.structs.asdict(side) for side in sides], **report}
        Path(args.result_json).write_text(json.dumps(content), encoding="utf-8")
    return 0


async def _measure(args: argparse.Namespace, folder: Path) -> list[Side]:
    """Rounds of both sides in turn, so that a change of the machine's speed meets both."""
    from troupellm.actors.engine import Engine

    whole = args.prompts * args.prompt_len
    shape = SHAPES[args.preset]
    tokens = args.prompts * (args.prompt_len + args.output_len + 16) + _CACHE_TOKENS_SPARE
    bytes_per_token = (
        8 * shape.num_hidden_layers * shape.num_key_value_heads * (shape.hidden_size // shape.num_attention_heads)
    )
    settings = {
        "max_num_batched_tokens": max(2048, whole + args.prompts),
        "kv_cache_memory_bytes": tokens * bytes_per_token,
        "enable_prefix_caching": False,  # rounds must not find each other's prompts
        "num_threads": args.threads or os.cpu_count() or 1,
        "device": "cpu",
    }
    source = random.Random(0)
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        in_one_step = {"max_num_prefill_tokens": whole, "itl_target_ms": 0.0}
        for own in ({}, in_one_step):
            engine = Engine(folder, **{**settings, **own})
            engines.append(await stack.enter_async_context(engine))
        saturating = engines[0].ready.saturation_tokens
        sides = [Side("budget", saturating, [], [], []), Side("one step", whole, [], [], [])]
        for number in range(args.repeats + 1):
            for side, engine in zip(sides, engines, strict=True):
                prompts = [
                    [source.randrange(shape.vocab_size) for _ in range(args.prompt_len)] for _ in range(args.prompts)
                ]
                firsts, seconds = await _round(engine, prompts, args.output_len)
                if number:  # the first round warms up
                    side.first_token.append(median(firsts))
                    side.last_first_token.append(max(firsts))
                    side.rate.append((whole + args.prompts * args.output_len) / seconds)
    return sides


async def _round(engine: "Engine", prompts: list[list[int]], output_len: int) -> tuple[list[float], float]:
    """All prompts at once; seconds to each one's first token, and to the end of the last."""
    begin = time.perf_counter()
    firsts: list[float] = []

    async def read(prompt: list[int]) -> None:
        async with engine.stream(prompt, max_tokens=output_len, temperature=0.0, ignore_eos=True) as stream:
            await anext(stream)
            firsts.append(time.perf_counter() - begin)
            async for _ in stream:
                pass

    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(read, prompt)
    return firsts, time.perf_counter() - begin


def _report(sides: list[Side]) -> dict[str, float]:
    """Ratios of the first side to the second: medians over the rounds' own ratios, which share the machine's mood."""
    budget, whole = sides
    pairs = zip(budget.first_token, whole.first_token, strict=True)
    rates = zip(budget.rate, whole.rate, strict=True)
    return {
        "first_token_ratio": median([ours / theirs for ours, theirs in pairs]),
        "throughput_ratio": median([ours / theirs for ours, theirs in rates]),
    }


def _text(args: argparse.Namespace, sides: list[Side], report: dict[str, float]) -> str:
    lines = [f"{args.prompts} prompts of {args.prompt_len} tokens at once, {args.preset}, {args.repeats} rounds"]
    lines.append(f"{'':10} {'tokens/step':>11} {'TTFT p50':>9} {'TTFT last':>10} {'tokens/s':>9}")
    lines += [
        f"{side.name:10} {side.budget:11} {median(side.first_token):8.3f}s {median(side.last_first_token):9.3f}s "
        f"{median(side.rate):9.1f}"
        for side in sides
    ]
    lines.append(
        f"median TTFT {report['first_token_ratio']:.2f}x (target: at most {TTFT_TARGET}x), "
        f"throughput {report['throughput_ratio']:.2f}x"
    )
    return "\n".join(lines)
