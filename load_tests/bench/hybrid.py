"""`bench hybrid`: a model of the shape of Qwen3-Next, with gated delta nets: decoding beside `transformers`, the second
turn of a chat, and the cost of snapshots.

Goals are of the shape with 100 million parameters. `transformers` computes its recurrences with torch's operations, as
wherever it finds no CUDA kernels.
"""

import argparse
import json
import random
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

from troupellm.load_tests.contestants.generation import Contestant, Reference, StaticBatches, Troupe
from troupellm.load_tests.contestants.workload import Request, turns, usable_cores
from troupellm.load_tests.random_model import write_tokenizer

SHAPES: dict[str, dict[str, int]] = {
    "100m": {
        "vocab_size": 16384, "hidden_size": 640, "num_hidden_layers": 12, "intermediate_size": 1792,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 112,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip
WANTED = {1: 2.0, 16: 5.0}
"""By rows, how many times as fast as `transformers`."""
MOST_AGAIN = 64
"""Tokens of a second turn that may be computed beside its new ones."""
MOST_TTFT, MOST_SNAPSHOT_COST = 0.1, 0.03
"""Time to the first token of the second turn, by that of the first; and what snapshots may take of a long prompt."""


def run(args: argparse.Namespace) -> int:
    if find_spec("transformers") is None:
        print("bench hybrid: transformers comes with the test tools (make test)", file=sys.stderr)
        return 2
    threads = args.num_threads or usable_cores()
    with tempfile.TemporaryDirectory(prefix="troupe-hybrid-") as name:
        size = write_model(Path(name), args.preset)
        print(f"random Qwen3-Next of {size / 1e6:.1f} M parameters, float32, {threads} threads", flush=True)
        report = anyio.run(
            _measure, args, Path(name), threads, backend_options={"use_uvloop": find_spec("uvloop") is not None}
        )
    print(table(report, judge=args.preset == "100m"))
    if args.result_json:
        Path(args.result_json).write_text(json.dumps({"preset": args.preset, "num_threads": threads, **report}))
    return 0


def write_model(folder: Path, preset: str) -> int:
    """Write a random checkpoint, and give the number of its parameters. One layer in four has attention."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3NextConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes = SHAPES[preset]
    config = Qwen3NextConfig(
        **sizes,
        mlp_only_layers=list(range(sizes["num_hidden_layers"])),
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(folder, sizes["vocab_size"])
    return sum(parameter.numel() for parameter in model.parameters())


async def _measure(args: argparse.Namespace, folder: Path, threads: int) -> dict[str, Any]:
    vocab_size = SHAPES[args.preset]["vocab_size"]
    draw = random.Random(0)
    decode = {}
    reference = Reference(folder, num_threads=threads)
    for rows in args.rows:
        requests = [Request(_tokens(draw, args.input_len, vocab_size), args.output_len) for _ in range(rows)]
        pages = rows * (args.input_len + args.output_len + 32) // 16 + 16
        contestants: dict[str, Contestant] = {
            "troupellm": Troupe(folder, num_threads=threads, num_blocks=pages, max_num_seqs=rows),
            "transformers": StaticBatches(reference, batch_size=rows),
        }
        decode[rows] = await _compete(contestants, requests, args.repeats)
    prompt = _tokens(draw, args.chat_len, vocab_size)
    chat = [await _two_turns(folder, threads, prompt, _tokens(draw, 40, vocab_size)) for _ in range(args.repeats)]
    costs = [await _snapshot_cost(folder, threads, prompt, args.interval) for _ in range(args.repeats)]
    return {
        "decode": {
            rows: {"tokens_per_s": {name: rows * args.output_len / median(taken) for name, taken in found.items()},
                   "ratio": median(a / b for a, b in zip(found["transformers"], found["troupellm"], strict=True))}
            for rows, found in decode.items()
        },
        "second_turn": {
            "new_tokens": chat[0][0],
            "computed_tokens": max(computed for _, computed, _ in chat),
            "ttft_by_first": median(ratio for _, _, ratio in chat),
        },
        "snapshot_cost": median(costs),
    }  # fmt: skip


def _tokens(draw: random.Random, length: int, vocab_size: int) -> list[int]:
    return [draw.randrange(3, vocab_size) for _ in range(length)]


async def _compete(
    contestants: dict[str, Contestant], requests: Sequence[Request], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each run; the first turn of each contestant is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, contestant in turns(list(contestants.items()), repeat):
            async with AsyncExitStack() as turn:
                await contestant.start(turn)
                begin = time.perf_counter()
                await contestant.answer(requests)
                taken = time.perf_counter() - begin
            if repeat:
                seconds[name].append(taken)
    return seconds


async def _two_turns(folder: Path, threads: int, prompt: list[int], more: list[int]) -> tuple[int, int, float]:
    """A long prompt, and one that goes on behind its answer: the new tokens, those computed, and the ratio of times."""
    from troupellm.actors.engine.engine import Engine

    async with Engine(folder, dtype="float32", num_threads=threads) as engine:
        first, answer, _ = await _timed(engine, prompt, 16)
        second, _, computed = await _timed(engine, [*prompt, *answer, *more], 1)
    return len(more) + 1, computed, second / first  # the answer's last token was never computed


async def _snapshot_cost(folder: Path, threads: int, prompt: list[int], interval: int) -> float:
    """Share of a prompt's time that snapshots at an interval take."""
    from troupellm.actors.engine.engine import Engine

    seconds = []
    for each in (interval, 0):
        settings = {"dtype": "float32", "num_threads": threads, "state_snapshot_interval": each}
        async with Engine(folder, **settings) as engine:
            await _timed(engine, prompt[:64], 1)
            seconds.append((await _timed(engine, prompt[64:], 1))[0])
    return seconds[0] / seconds[1] - 1.0


async def _timed(engine: Any, prompt: list[int], output_len: int) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer, and how many tokens of the prompt were computed."""
    begin, first, answer = time.perf_counter(), 0.0, list[int]()
    async with engine.stream(prompt, max_tokens=output_len, temperature=0.0, ignore_eos=True) as stream:
        async for delta in stream:
            first = first or time.perf_counter() - begin
            answer += delta.token_ids
        usage = stream.usage
    return first, answer, usage.prompt_tokens - usage.cached_tokens


def table(report: dict[str, Any], *, judge: bool = True) -> str:
    """`judge` says whether each figure is what is wanted, which only means something for a model of real size."""
    lines = []

    def add(name: str, figure: str, wanted: str, *, kept: bool) -> None:
        verdict = f"   wanted {wanted}   {'kept' if kept else 'MISSED'}" if judge else ""
        lines.append(f"{name:<44}{figure:>12}{verdict}")

    for rows, cell in report["decode"].items():
        rates, wanted = cell["tokens_per_s"], WANTED.get(int(rows), 1.0)
        shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        lines.append(f"{rows} rows, tokens/s: {shown}")
        add(f"{rows} rows, by transformers", f"{cell['ratio']:.2f} x", f"{wanted:.1f} x", kept=cell["ratio"] >= wanted)
    turn = report["second_turn"]
    most, computed = turn["new_tokens"] + MOST_AGAIN, turn["computed_tokens"]
    add("second turn, tokens computed", f"{computed}", f"<= {most}", kept=computed <= most)
    ratio, cost = turn["ttft_by_first"], report["snapshot_cost"]
    add("second turn, first token by the first turn's", f"{ratio:.3f} x", f"<= {MOST_TTFT} x", kept=ratio <= MOST_TTFT)
    add("snapshots, of a prompt's time", f"{cost:.1%}", f"<= {MOST_SNAPSHOT_COST:.0%}", kept=cost <= MOST_SNAPSHOT_COST)
    return "\n".join(lines)
