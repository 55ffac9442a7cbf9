"""`bench prefill`: first tokens of prompts that come together, within the device's budget and all in one step.

A wave by itself ends with few sequences in a step, for those that began early are done early, and that end weighs much
where answers are short. Under a load that goes on, others take their places; both are measured.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from troupellm.load_tests.contestants.workload import usable_cores
from troupellm.load_tests.random_model import SHAPES, write_random_model

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

TTFT_TARGET = 0.65
"""Median time to first token within the budget, over that of one step for all."""
_CACHE_TOKENS_SPARE = 4096
_DEFAULT_MAX_NUM_SEQS = 256

Prompt = list[int]


class Side(msgspec.Struct):
    """One way of cutting prompts into steps; lists have an entry per round, seconds and tokens per second."""

    name: str
    budget: int
    first_token: list[float] = []
    """Medians over the requests of a wave by itself."""
    last_first_token: list[float] = []
    rate: list[float] = []
    """Prompt and generated tokens per second of that wave."""
    sustained_first_token: list[float] = []
    """Medians over the requests of all waves in a row, each from when it was sent."""
    sustained_rate: list[float] = []
    """Prompt and generated tokens per second, over all of them."""


class Load(msgspec.Struct, frozen=True):
    """The clients' measurements."""

    first_token: list[float]
    """Seconds from sending a request, for each of them."""
    seconds: float
    """From the first request to the end of the last answer."""
    tokens: int
    """Of prompts and answers."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(args: argparse.Namespace) -> int:
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    threads = args.threads or usable_cores()
    with tempfile.TemporaryDirectory(prefix="troupe-prefill-") as name:
        folder = write_random_model(Path(name) / "model", SHAPES[args.preset])
        sides = anyio.run(_measure, args, folder, threads, backend_options=backend)
    report = summarise(sides)
    print(_text(args, sides, report))
    if args.result_json:
        names = ("preset", "prompts", "prompt_len", "output_len", "waves", "repeats")
        content: dict[str, Any] = {name: getattr(args, name) for name in names}
        content |= {"num_threads": threads, "sides": [msgspec.structs.asdict(side) for side in sides], **report}
        Path(args.result_json).write_text(json.dumps(content), encoding="utf-8")
    return 0


async def _measure(args: argparse.Namespace, folder: Path, threads: int) -> list[Side]:
    """Rounds of both sides in turn, so that a change of the machine's speed meets both; another one begins each."""
    from troupellm.actors.engine.engine import Engine

    whole = args.prompts * args.prompt_len
    source, vocab_size = random.Random(0), SHAPES[args.preset].vocab_size
    async with AsyncExitStack() as stack:
        engines: list[Engine] = []
        in_one_step = {"max_num_prefill_tokens": whole, "itl_target_ms": 0.0}
        for own in ({}, in_one_step):
            engine = Engine(folder, **{**_settings(args, threads), **own})
            engines.append(await stack.enter_async_context(engine))
        sides = [Side("budget", engines[0].ready.saturation_tokens), Side("one step", whole)]
        pairs = list(zip(sides, engines, strict=True))
        for number in range(args.repeats + 1):
            turns = pairs if number % 2 else pairs[::-1]
            alone = _clients(source, vocab_size, args, 1)
            for side, engine in turns:
                wave = await load(engine, alone, args.output_len)
                if number:  # the first round warms up
                    side.first_token.append(median(wave.first_token))
                    side.last_first_token.append(max(wave.first_token))
                    side.rate.append(wave.rate)
            sustained = _clients(source, vocab_size, args, args.waves if number else min(args.waves, 2))
            for side, engine in turns:
                waves = await load(engine, sustained, args.output_len)
                if number:
                    side.sustained_first_token.append(median(waves.first_token))
                    side.sustained_rate.append(waves.rate)
    return sides


def _settings(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Of both engines, with room for all prompts of a wave."""
    shape = SHAPES[args.preset]
    tokens = args.prompts * (args.prompt_len + args.output_len + 16) + _CACHE_TOKENS_SPARE
    bytes_per_token = 8 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_size
    return {
        "max_num_batched_tokens": max(2048, args.prompts * args.prompt_len + args.prompts),
        "max_num_seqs": max(_DEFAULT_MAX_NUM_SEQS, args.prompts),
        "kv_cache_memory_bytes": tokens * bytes_per_token,
        "enable_prefix_caching": False,  # both sides have the same prompts
        "num_threads": threads,
        "device": "cpu",
    }


def _clients(source: random.Random, vocab_size: int, args: argparse.Namespace, waves: int) -> list[list[Prompt]]:
    """New prompts, `waves` for each client."""
    return [
        [[source.randrange(vocab_size) for _ in range(args.prompt_len)] for _ in range(waves)]
        for _ in range(args.prompts)
    ]


async def load(engine: "Engine", clients: Sequence[Sequence[Prompt]], output_len: int) -> Load:
    """All clients at once, each with a list of prompts: it sends one when the answer to the one before is complete,
    and does not wait for other clients.

    Raises:
        RuntimeError: an answer has another number of tokens.
    """
    first_token: list[float] = []
    begin = time.perf_counter()

    async def ask(prompts: Sequence[Prompt]) -> None:
        sent = begin
        for prompt in prompts:
            async with engine.stream(prompt, max_tokens=output_len, temperature=0.0, ignore_eos=True) as stream:
                await anext(stream)
                first_token.append(time.perf_counter() - sent)
                async for _ in stream:
                    pass
            if stream.usage is None or stream.usage.completion_tokens != output_len:
                raise RuntimeError("an answer has not the wanted number of tokens, so the sides cannot be compared")
            sent = time.perf_counter()

    async with anyio.create_task_group() as group:
        for prompts in clients:
            group.start_soon(ask, prompts)
    seconds = time.perf_counter() - begin
    return Load(first_token, seconds, sum(len(prompt) + output_len for prompts in clients for prompt in prompts))


RATIOS = {
    "first_token_ratio": "first_token",
    "throughput_ratio": "rate",
    "sustained_first_token_ratio": "sustained_first_token",
    "sustained_throughput_ratio": "sustained_rate",
}


def summarise(sides: Sequence[Side]) -> dict[str, float]:
    """Ratios of the first side to the second: medians over the rounds' own ratios, which share the machine's mood."""
    budget, whole = sides
    return {
        name: median(ours / theirs for ours, theirs in zip(getattr(budget, field), getattr(whole, field), strict=True))
        for name, field in RATIOS.items()
    }


def _text(args: argparse.Namespace, sides: Sequence[Side], report: dict[str, float]) -> str:
    lines = [f"{args.preset}, {args.repeats} rounds; {args.prompts} prompts of {args.prompt_len} tokens at once"]
    lines[0] += f", answers of {args.output_len}; sustained: each client sends {args.waves}, one after another"
    lines.append(
        f"{'':10} {'tokens/step':>11} {'TTFT p50':>9} {'TTFT last':>10} {'tokens/s':>9}"
        f" {'sustained TTFT p50':>19} {'tokens/s':>9}"
    )
    lines += [
        f"{side.name:10} {side.budget:11} {median(side.first_token):8.3f}s {median(side.last_first_token):9.3f}s "
        f"{median(side.rate):9.1f} {median(side.sustained_first_token):18.3f}s {median(side.sustained_rate):9.1f}"
        for side in sides
    ]
    lines.append(
        f"one wave: median TTFT {report['first_token_ratio']:.2f}x (target: at most {TTFT_TARGET}x), "
        f"throughput {report['throughput_ratio']:.2f}x"
    )
    lines.append(
        f"sustained: median TTFT {report['sustained_first_token_ratio']:.2f}x, "
        f"throughput {report['sustained_throughput_ratio']:.2f}x"
    )
    return "\n".join(lines)
