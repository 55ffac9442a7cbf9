"""32 streams of every kind, and the real process of one replica killed under them: each ends with its solo tokens."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm import Engine
from troupellm.actors.client.stream import Stream
from troupellm.actors.replicas.fleet import Fleet
from troupellm.actors.replicas.replica import spawn_process
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.server.serve.run import REPLICA_MODULE
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually, server_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

STREAMS = 32
LENGTH = 300
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "minLength": 150, "maxLength": 200}},
            "required": ["where"],
            "additionalProperties": False,
        },
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "guided": {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(regex="([a-z]{9} ){40}[xyz]{40}")},
    "two": {"temperature": 1.0, "n": 2},
    "tools": {"temperature": 1.0},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.1, "min_tokens": 250},
    "adapter": {"temperature": 1.0, "adapter": "a"},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
}


def settings(checkpoint: Path, adapter: Path) -> dict[str, Any]:
    return SETTINGS | {
        "kv_cache_memory_bytes": 32 * 2**20,
        "max_num_seqs": 64,
        "enable_lora": True,
        "lora_modules": [f"a={adapter}"],
        "speculative_config": {"method": "suffix", "adaptive": False},
    }


def stream_of(engine: Any, number: int) -> Stream:
    kind = list(KINDS)[number % len(KINDS)]
    asked = KINDS[kind] | {"seed": number, "max_tokens": LENGTH, "ignore_eos": True}
    # The same tokens over and over give the drafts of `suffix` something to find.
    prompt = [40 + number, *[41, 42, 43, 44] * 6, 42 + number % 7]
    stream: Stream
    if kind == "tools":
        named = {"type": "function", "function": {"name": "book"}}
        messages = [{"role": "user", "content": f"Book number {number}"}]
        stream = engine.chat(messages, tools=[TOOL], tool_choice=named, **asked)
    else:
        stream = engine.stream(prompt, **asked)
    return stream


Tokens = dict[int, tuple[int, ...]]


async def read(engine: Any, number: int, seen: dict[int, int]) -> Tokens:
    tokens: dict[int, list[int]] = {}
    async with stream_of(engine, number) as stream:
        async for delta in stream:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            seen[number] = seen.get(number, 0) + len(delta.token_ids)
    assert stream.usage.completion_tokens == sum(map(len, tokens.values()))
    return {index: tuple(ids) for index, ids in tokens.items()}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_tiny_adapter(tmp_path / "a", 1)


async def test_R13_32_of_32_streams_end_with_their_solo_tokens_over_a_killed_process(
    checkpoint: Path, adapter: Path
) -> None:
    given = settings(checkpoint, adapter)
    solo: dict[int, Tokens] = {}
    async with Engine(checkpoint, **given) as engine:
        for number in range(STREAMS):
            solo[number] = await read(engine, number, {})
    whole = EngineConfig.from_flat(given | {"model": str(checkpoint), "data_parallel_size": 2, "worker_process": False})
    async with Fleet(whole, server_config(), partial(spawn_process, REPLICA_MODULE)) as fleet:
        answers: dict[int, Tokens] = {}
        seen: dict[int, int] = {}

        async def one(number: int) -> None:
            answers[number] = await read(fleet, number, seen)

        async with anyio.create_task_group() as group:
            for number in range(STREAMS):
                group.start_soon(one, number)
            await eventually(lambda: len(seen) == STREAMS and min(seen.values()) > 5, SPARE_SECONDS)
            victim = fleet.replicas[0]
            moved = len(victim.requests)
            assert moved >= STREAMS // 4
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
        assert {number for number in range(STREAMS) if answers[number] != solo[number]} == set()
        text = (await fleet.metrics(compat=True)).decode()
        assert f'troupellm_failovers_total{{reason="died"}} {float(moved)}' in text
