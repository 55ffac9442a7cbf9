"""`bench offload`: what KV offload gives, and what it costs where it gives nothing. One run, turn by turn, medians."""

import argparse
import json
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import msgspec

from troupellm.load_tests.contestants.workload import usable_cores
from troupellm.load_tests.kv_cache.crowd import crowd
from troupellm.load_tests.kv_cache.restore import BLOCK, Restored, restore
from troupellm.load_tests.kv_cache.throughput import Load, Rates, throughput
from troupellm.load_tests.random_model import SHAPES, Shape, write_random_model

HOST_TARGET, DISK_TARGET = 0.02, 0.1
"""Seconds to the first token with a restored prefix, over those of computing it."""
CHECKED_LEN = 512
"""Tokens of prefixes whose answers are compared."""
THROUGHPUT_TARGET = 0.99
"""Tokens per second with offload on and no hits, over those with it off."""
MOST_DIFFERENT = 0


class Verdict(msgspec.Struct, frozen=True):
    what: str
    value: float
    wanted: str
    good: bool


def run(args: argparse.Namespace) -> int:
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    with tempfile.TemporaryDirectory(prefix="troupe-offload-") as name:
        shape = msgspec.structs.replace(SHAPES[args.preset], max_position_embeddings=2 * args.prefix_len)
        folder = write_random_model(Path(name) / "model", shape)
        disk = Path(args.folder) if args.folder else Path(name) / "blocks"
        content, verdicts = anyio.run(_measure, args, folder, shape, disk, backend_options=backend)
    print(_table(verdicts))
    if args.result_json:
        content["verdicts"] = [msgspec.structs.asdict(verdict) for verdict in verdicts]
        Path(args.result_json).write_text(json.dumps(content), encoding="utf-8")
    return 0 if all(verdict.good for verdict in verdicts) else 1


async def _measure(
    args: argparse.Namespace, folder: Path, shape: Shape, disk: Path
) -> tuple[dict[str, Any], list[Verdict]]:
    threads = args.threads or usable_cores()
    settings = {"device": "cpu", "num_threads": threads, "max_model_len": 2 * args.prefix_len}
    content: dict[str, Any] = {"arguments": {name: value for name, value in vars(args).items() if name != "func"}}
    verdicts: list[Verdict] = []
    size = shape.num_hidden_layers * shape.num_key_value_heads * shape.head_size * 2 * 4
    model = {"vocab_size": shape.vocab_size, "token_bytes": size}
    print(f"{args.preset}: {size} bytes of keys and values per token, {size * args.prefix_len / 1e6:.0f} MB per prefix")
    for tier, target in (("host", HOST_TARGET), ("disk", DISK_TARGET)):
        if tier in args.parts:
            found = await restore(
                folder, settings, args.prefix_len, args.repeats, disk if tier == "disk" else None, **model
            )
            sure = await restore(
                folder,
                {**settings, "batch_invariant": True},
                min(args.prefix_len, CHECKED_LEN),
                3,
                disk.with_name("checked-blocks") if tier == "disk" else None,
                **model,
            )
            content[tier] = {"timed": msgspec.structs.asdict(found), "checked": msgspec.structs.asdict(sure)}
            verdicts += _restore_verdicts(tier, found, sure, target, args.prefix_len)
    if "throughput" in args.parts:
        load = Load(requests=args.requests, prompt_len=args.prompt_len, output_len=args.output_len)
        rates = await throughput(folder, settings, load, args.repeats, **model)
        content["throughput"] = msgspec.structs.asdict(rates)
        verdicts.append(_throughput_verdict(rates))
    if "crowd" in args.parts:
        for mode, different in (await crowd(args.crowd)).items():
            text = f"{args.crowd} requests on 16 blocks, {mode}: answers unlike alone"
            verdicts.append(Verdict(text, different, "0", different <= MOST_DIFFERENT))
    return content, verdicts


def _restore_verdicts(tier: str, found: Restored, sure: Restored, target: float, prefix: int) -> list[Verdict]:
    """prefix: tokens, of which all but the last two blocks must have been restored, every time."""
    ratios = [warm / cold for warm, cold in zip(found.restored, found.computed, strict=True)]
    print(
        f"{tier}: computed {median(found.computed):.3f} s, restored {median(found.restored):.4f} s; "
        f"{min(found.tokens_restored)} tokens of the prefix came from there"
    )
    return [
        Verdict(
            f"first token with a prefix from {tier}, over computing it",
            median(ratios),
            f"<= {target}",
            median(ratios) <= target,
        ),
        Verdict(
            f"tokens of a prefix from {tier}",
            min(found.tokens_restored),
            f">= {prefix - 2 * BLOCK}",
            min(found.tokens_restored) >= prefix - 2 * BLOCK,
        ),
        Verdict(
            f"answers with a prefix from {tier} unlike the computed ones",
            sure.different,
            "0",
            sure.different == 0 and min(sure.tokens_restored) >= min(prefix, CHECKED_LEN) - 2 * BLOCK,
        ),
    ]


def _throughput_verdict(rates: Rates) -> Verdict:
    ratio = median([on / off for on, off in zip(rates.on, rates.off, strict=True)])
    print(
        f"throughput: {median(rates.off):.1f} tokens/s off, {median(rates.on):.1f} on, {rates.stored_blocks} blocks "
        f"stored, {rates.hit_tokens} tokens hit; processor time "
        f"{median([off / on for on, off in zip(rates.on_cpu, rates.off_cpu, strict=True)]):.3f}x"
    )
    return Verdict(
        "throughput with offload on and no hits, over off",
        ratio,
        f">= {THROUGHPUT_TARGET}",
        ratio >= THROUGHPUT_TARGET and not rates.hit_tokens,
    )


def _table(verdicts: Sequence[Verdict]) -> str:
    width = max((len(verdict.what) for verdict in verdicts), default=0)
    return "\n".join(
        f"{verdict.what:{width}}  {verdict.value:8.4f}  {verdict.wanted:>8}  {'ok' if verdict.good else 'MISSED'}"
        for verdict in verdicts
    )
