"""`bench quality`: what fewer bits cost: perplexity and agreement beside bytes and tokens per second.

Each file becomes a checkpoint of 32-bit floats whose inner dimensions stand in another order
(`load_tests/quality/checkpoint.py`). Every setting reads the same windows of the same texts, and is compared token by
token with the one of full precision.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from troupellm import LLM, SamplingParams
from troupellm.load_tests.quality.checkpoint import write_reordered
from troupellm.load_tests.quality.scores import Compared, Scores, compared, scores, windows
from troupellm.load_tests.quality.texts import texts

FULL = "fp32"
SETTINGS: dict[str, dict[str, Any]] = {
    FULL: {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
}
BARS = {"int8": 0.01, "int4": 0.05, "KV int8": 0.02}
"""The most that the perplexity may grow by, over all texts of a model."""
LONGEST_TOKEN = 12
"""Characters of a token, in the mean of a text, at most."""
ROWS, PROMPT_TOKENS = 8, 16
"""Of the answers whose speed is measured."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One model under one setting."""

    model: str
    setting: str
    by_text: dict[str, Compared]
    overall: Compared
    weight_bytes: int
    kv_bytes_per_token: float
    tokens_per_second: float

    @property
    def missed(self) -> bool:
        return self.overall.change > BARS.get(self.setting, float("inf"))


def run(args: argparse.Namespace) -> int:
    """1 when a setting costs more than its bar, 2 without a file."""
    if not args.files:
        print("bench quality: name GGUF files with --files", file=sys.stderr)
        return 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="troupe-quality-") as work:
        for file in map(Path, args.files):
            folder = write_reordered(file.absolute(), Path(work) / file.stem)
            rows += measure(file.stem, folder, args)
            print(table([row for row in rows if row.model == file.stem]) + "\n", flush=True)
    for row in rows:
        if row.missed:
            print(f"missed: {row.setting} of {row.model} costs {row.overall.change:+.1%}, bar {BARS[row.setting]:.0%}")
    if args.result_json:
        Path(args.result_json).write_text(json.dumps(msgspec.to_builtins(rows), indent=1), encoding="utf-8")
    return int(any(row.missed for row in rows))


def measure(name: str, folder: Path, args: argparse.Namespace) -> list[Row]:
    """All settings of one model; their engines are loaded together, so that their speeds meet the same machine."""
    settings = [FULL, *(setting for setting in args.settings if setting != FULL)]
    with ExitStack() as stack:
        engines = {
            setting: stack.enter_context(
                LLM(
                    folder,
                    dtype="float32",
                    max_model_len=args.window + 1,
                    max_num_seqs=ROWS,
                    kv_cache_memory_bytes=args.kv_cache_mib * 2**20,
                    enable_prefix_caching=False,
                    num_threads=args.num_threads,
                    **SETTINGS[setting],
                )
            )
            for setting in settings
        }
        tokenizer = engines[FULL].get_tokenizer()
        pieces = {
            text: windows(
                tokenizer.encode(content[: args.tokens * 8], add_special_tokens=False), args.tokens, args.window
            )
            for text, content in texts().items()
        }
        found = {
            setting: {text: scores(llm, of_text) for text, of_text in pieces.items()}
            for setting, llm in engines.items()
        }
        speeds = decode_speeds(engines, args.output_len, args.rounds)
        return [
            Row(
                model=name,
                setting=setting,
                by_text={text: compared(found[setting][text], found[FULL][text]) for text in pieces},
                overall=compared(together(found[setting].values()), together(found[FULL].values())),
                weight_bytes=engines[setting].engine.ready.weight_bytes,
                kv_bytes_per_token=kv_bytes_per_token(engines[setting]),
                tokens_per_second=speeds[setting],
            )
            for setting in settings
        ]


def together(of: Iterable[Scores]) -> Scores:
    """The scores of several texts as of one."""
    parts = list(of)
    return Scores([one for part in parts for one in part.logprobs], [one for part in parts for one in part.best])


def kv_bytes_per_token(llm: LLM) -> float:
    ready = llm.engine.ready
    return ready.kv_cache_bytes / (ready.num_blocks * ready.block_size)


def decode_speeds(engines: dict[str, LLM], tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of `ROWS` greedy answers, the median of rounds in which each engine has its turn."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = [{"prompt_token_ids": [7 + row] * PROMPT_TOKENS} for row in range(ROWS)]
    seconds: dict[str, list[float]] = {setting: [] for setting in engines}
    for turn in range(rounds + 1):
        for setting, llm in engines.items():
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if turn:  # the first turn warms up
                seconds[setting].append(time.perf_counter() - begin)
    return {setting: ROWS * tokens / median(taken) for setting, taken in seconds.items()}


def table(rows: Sequence[Row]) -> str:
    """One line for each setting of a model."""
    names = list(rows[0].by_text)
    head = f"{'':<10}{'perplexity':>11}{'change':>9}{'error':>7}" + "".join(f"{name:>9}" for name in names)
    lines = [rows[0].model, f"{head}{'agrees':>9}{'MiB':>7}{'KV B/token':>12}{'tokens/s':>10}"]
    for row in rows:
        over = row.overall
        lines.append(
            f"{row.setting:<10}{over.perplexity:>11.3f}{over.change:>+9.2%}{over.error:>7.2%}"
            + "".join(f"{row.by_text[name].change:>+9.2%}" for name in names)
            + f"{over.agreement:>9.1%}{row.weight_bytes / 2**20:>7.0f}{row.kv_bytes_per_token:>12,.0f}"
            + f"{row.tokens_per_second:>10,.0f}"
        )
    return "\n".join(lines)
