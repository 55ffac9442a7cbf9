"""`bench handover`: prefill on one engine, decode on another one, beside an engine that does both.

The worked example of disaggregated serving, on one machine: three engines of one model. The prompt goes to the prefill
engine with max_tokens=1; its blocks go through the connector; then the prompt goes to the decode engine, which finds
them there and computes what is left. The tokens must be those of the engine that works alone.
"""

import argparse
import asyncio
import json
import random
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec

PATIENCE_SECONDS = 60.0
"""For the blocks of a prompt to arrive at the connector."""
_HOST_MEMORY = "256MiB"
_CONNECTOR_MEMORY = "256MiB"


class Handed(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt."""

    prompt_tokens: int
    handed_over: int
    """Prompt tokens that the decode engine did not compute again."""
    identical: bool
    """Whether its tokens are those of the engine that works alone."""
    first_token_seconds: float
    """At the decode engine, from when it was asked."""
    first_token_seconds_alone: float
    """At the engine that works alone."""


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a token differs, or nothing was handed over."""
    given = {} if args.num_threads is None else {"num_threads": args.num_threads}
    results = asyncio.run(hand_over(args, given))
    print(table(args, results))
    if args.result_json:
        Path(args.result_json).write_text(json.dumps(msgspec.to_builtins(results)), encoding="utf-8")
    return int(not all(each.identical and each.handed_over for each in results))


async def hand_over(args: argparse.Namespace, settings: dict[str, Any]) -> list[Handed]:
    """All prompts, one after the other. `settings` are those of all engines."""
    from troupellm.actors.engine.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        prefill, decode = sides(args.connector, Path(folder))
        async with (
            Engine(args.model, **settings) as alone,
            Engine(args.model, **settings, **prefill) as prefiller,
            Engine(args.model, **settings, **decode) as decoder,
        ):
            draw = random.Random(0)
            width = min(alone.limits.vocab_width, 1000)
            prompts = [[draw.randrange(3, width) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
            return [await _one(alone, prefiller, decoder, prompt, args.max_tokens) for prompt in prompts]


def sides(connector: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the engine that prefills, and of the one that decodes."""
    if connector == "tcp-peer":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options: tuple[dict[str, Any], dict[str, Any]] = (
            {"listen": port, "bytes": _CONNECTOR_MEMORY},
            {"peers": [f"127.0.0.1:{port}"]},
        )
    else:
        options = ({"path": str(folder / "blocks"), "bytes": _CONNECTOR_MEMORY},) * 2
    prefill, decode = [
        {
            "kv_offloading_size": _HOST_MEMORY,
            "prefix_hash_secret_file": str(folder / "secret"),
            "preemption_mode": "offload",  # also where a model is so small that computing is as quick as moving
            "kv_transfer_config": {
                "kv_connector": connector,
                "kv_role": role,
                "kv_connector_extra_config": own,
            },
        }
        for role, own in zip(("kv_producer", "kv_consumer"), options, strict=True)
    ]
    return prefill, decode


def table(args: argparse.Namespace, results: list[Handed]) -> str:
    """As text."""
    lines = [
        f"prefill on one engine, decode on another one, through {args.connector}",
        f"{'prompt':>8} {'handed over':>12} {'same tokens':>12} {'first token':>12} {'alone':>8}",
    ]
    lines += [
        f"{each.prompt_tokens:>8} {each.handed_over:>12} {'yes' if each.identical else 'NO':>12} "
        f"{1000 * each.first_token_seconds:>9.1f} ms {1000 * each.first_token_seconds_alone:>5.1f} ms"
        for each in results
    ]
    return "\n".join(lines)


async def _one(alone: Any, prefiller: Any, decoder: Any, prompt: list[int], max_tokens: int) -> Handed:
    greedy = {"temperature": 0.0, "ignore_eos": True}
    wanted = await alone.generate(prompt, max_tokens=max_tokens, **greedy)
    await prefiller.generate(prompt, max_tokens=1, **greedy)
    await arrived(prefiller)
    got = await decoder.generate(prompt, max_tokens=max_tokens, **greedy)
    return Handed(
        prompt_tokens=len(prompt),
        handed_over=got.usage.cached_sources.external,
        identical=got.token_ids == wanted.token_ids,
        first_token_seconds=got.timing.first_token,
        first_token_seconds_alone=wanted.timing.first_token,
    )


async def arrived(engine: Any) -> None:
    """Until the blocks of what an engine has computed are at its connector: nothing is under way any more.

    A router need not wait for that. An early request computes the missing blocks.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (offload := engine.snapshot().scheduler.offload).transfers or offload.waiting_spills:
            await asyncio.sleep(0.002)
