"""The first token of a prompt whose prefix has left the device, beside the one of a prompt that is new."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine

BLOCK = 16
SPARE_BLOCKS = 16
SETTLING_SECONDS = 300.0
ANSWER = 4
"""Tokens that are compared."""


class Restored(msgspec.Struct):
    """An entry per round; seconds to the first token."""

    computed: list[float]
    restored: list[float]
    held: list[float]
    """With the same prompt once more, which the device has by then."""
    tokens_restored: list[int]
    different: int = 0
    """Answers that are not those of the computed prefix. Random weights make near ties, which fall otherwise where a
    prompt is cut otherwise: only with batch_invariant must it be 0."""


class Answer(msgspec.Struct, frozen=True):
    seconds: float
    """To its first token."""
    token_ids: tuple[int, ...]
    restored: int
    """Prompt tokens that came from host memory or disk."""


async def restore(
    folder: Path,
    settings: dict[str, Any],
    prefix: int,
    repeats: int,
    disk: Path | None,
    *,
    vocab_size: int,
    token_bytes: int,
) -> Restored:
    """Each new prompt drives the one before it off the device (and, with a disk, out of host memory), which is then
    asked again.

    Args:
        prefix: tokens of a prompt.
        token_bytes: of one token's keys and values.
        disk: folder of a disk tier; None keeps all in host memory.
    """
    from troupellm.actors.engine.engine import Engine

    blocks = prefix // BLOCK
    block_bytes = token_bytes * BLOCK
    host_blocks = (3 * blocks if disk is None else blocks) + SPARE_BLOCKS
    more: dict[str, Any] = {"kv_offloading_size": f"{host_blocks * block_bytes}B"}
    if disk is not None:
        more |= {"kv_offload_disk_path": str(disk), "kv_offload_disk_bytes": 6 * (blocks + 1) * (block_bytes + 8192)}
    source, found = random.Random(1), Restored([], [], [], [])
    more |= {"block_size": BLOCK, "num_gpu_blocks_override": blocks + SPARE_BLOCKS, "max_model_len": prefix + 2 * BLOCK}
    engine = Engine(folder, **{**settings, **more})
    async with engine:
        before = source.choices(range(vocab_size), k=prefix)
        expected = (await _ask(engine, before)).token_ids
        await _settled(engine)
        for number in range(repeats + 1):
            new = source.choices(range(vocab_size), k=prefix)
            first = await _ask(engine, new)
            await _settled(engine)
            again = await _ask(engine, before)
            await _settled(engine)
            held = await _ask(engine, before)
            await _settled(engine)
            if number:  # the first round warms up
                found.computed.append(first.seconds)
                found.restored.append(again.seconds)
                found.held.append(held.seconds)
                found.tokens_restored.append(again.restored)
                found.different += again.token_ids != expected
            before, expected = new, first.token_ids
    return found


async def _ask(engine: "Engine", prompt: list[int]) -> Answer:
    completion = await engine.generate(prompt, max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    seconds, sources = completion.timing.first_token, completion.usage.cached_sources
    assert seconds is not None
    restored = 0 if sources is None else sources.host + sources.disk
    return Answer(seconds, completion.token_ids, restored)


async def _settled(engine: "Engine") -> None:
    """Until nothing moves between the tiers; raises TimeoutError when that takes too long."""
    with anyio.fail_after(SETTLING_SECONDS):
        while True:
            offload = engine.snapshot().scheduler.offload
            if offload is None or not (offload.transfers or offload.lookups or offload.waiting_spills):
                return
            await anyio.sleep(0.01)
