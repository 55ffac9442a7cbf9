"""Quantization on load and a KV cache in eight bits, through the whole engine: the built-in model's greedy tokens.

The model's margins are wide, so that most of its tokens stay the same with fewer bits. Changes by the engine to a
sequence (a crowd, chunks, preemption, prefix hits, forks, sleep, another process) must not change its tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import save_file

import troupellm
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.servers.serving import eventually

PROMPTS = (
    "What is the capital of France?", "Tell me a story about a fox.", "What is 3 + 4?", "What colour is the sky?",
    "Count to ten.", "How many legs does a spider have?", "Who are you?", "What is 12 + 30?",
    "Tell me a story about a dog.",
)  # fmt: skip
NEW_TOKENS = 32
AGREEMENT = {
    ("int8", "int8"): 1.0,
    ("fp8", "fp8"): 0.9,
    ("int4", "auto"): 0.9,
    ("int8-weight-only", "auto"): 1.0,
}
"""Of the tokens up to the first that differs, over all prompts."""


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


async def answers(engine: troupellm.Engine, prompts: Sequence[str] = PROMPTS) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()] * len(prompts)

    async def one(index: int) -> None:
        asked = [{"role": "user", "content": prompts[index]}]
        found[index] = (await engine.chat(asked, temperature=0.0, max_tokens=NEW_TOKENS).collect()).token_ids

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return found


def agreement(got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    same = 0
    for ours, theirs in zip(got, expected, strict=True):
        pairs = enumerate(zip(ours, theirs, strict=False))
        same += next((place for place, pair in pairs if pair[0] != pair[1]), min(len(ours), len(theirs)))
    return same / sum(len(answer) for answer in expected)


@pytest.fixture(scope="module")
async def plain() -> list[tuple[int, ...]]:
    async with troupellm.Engine(max_num_prefill_tokens=512, max_model_len=512) as engine:
        return await answers(engine)


@pytest.mark.anyio
@pytest.mark.parametrize(("mode", "cache"), AGREEMENT, ids=str)
async def test_the_same_tokens_with_fewer_bits(plain, mode: str | None, cache: str) -> None:
    async with troupellm.Engine(
        max_num_prefill_tokens=512, max_model_len=512, quantization=mode, kv_cache_dtype=cache
    ) as engine:
        got = await answers(engine)
        assert engine.ready.quantization == (mode or "")
        assert engine.ready.cache_dtype == cache
    assert agreement(got, plain) >= AGREEMENT[mode, cache]


@pytest.mark.anyio
async def test_int8_answers_are_the_same_after_chunks_preemption_forks_and_sleep() -> None:
    """In int8 throughout: chunks, preemption, replayed prefixes, forks and sleep against one sequence at a time."""
    eight = {"quantization": "int8", "kv_cache_dtype": "int8"}
    async with troupellm.Engine(max_num_prefill_tokens=512, max_model_len=128, **eight) as engine:
        alone = [(await answers(engine, [prompt]))[0] for prompt in PROMPTS]
        again = await engine.generate(PROMPTS[2] * 4, temperature=0.0, max_tokens=8)
        hit = await engine.generate(PROMPTS[2] * 4, temperature=0.0, max_tokens=8)
        assert hit.usage.cached_tokens >= 16
        assert hit.token_ids == again.token_ids
        forks = await engine.generate(PROMPTS[2] * 4, temperature=0.0, max_tokens=8, n=3)
        assert {choice.token_ids for choice in forks.choices} == {again.token_ids}
        await engine.sleep(2, "keep")
        await engine.wake()
        assert agreement(await answers(engine), alone) == 1.0
    small = {"num_gpu_blocks_override": 8, "max_num_batched_tokens": 20, "enable_prefix_caching": False}
    async with troupellm.Engine(max_num_prefill_tokens=512, max_model_len=128, **eight, **small) as engine:
        await engine.pause()
        found: list[tuple[int, ...]] = []

        async def ask() -> None:
            found.extend(await answers(engine))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await eventually(lambda: engine.snapshot().scheduler.waiting == len(PROMPTS))
            await engine.resume()  # all of them have come
        assert agreement(found, alone) >= 0.95
        assert engine.snapshot().scheduler.preemptions > 0


@pytest.mark.anyio
@pytest.mark.slow
async def test_in_a_process_of_its_own(plain) -> None:
    eight = {"quantization": "int8", "kv_cache_dtype": "int8", "worker_process": True}
    async with troupellm.Engine(max_num_prefill_tokens=512, max_model_len=512, **eight) as engine:
        assert agreement(await answers(engine), plain) >= AGREEMENT["int8", "int8"]


@pytest.mark.anyio
async def test_quantized_weights_take_less() -> None:
    sizes = {}
    for mode in (None, "int8"):
        async with troupellm.Engine(
            max_num_prefill_tokens=512, max_model_len=512, num_gpu_blocks_override=64, quantization=mode
        ) as engine:
            sizes[mode] = engine.ready.weight_bytes
    assert sizes["int8"] < 0.4 * sizes[None]


def test_a_number_that_no_block_holds_is_refused_by_its_tensor_s_name(tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": torch.full((4, 32), 1e6)}, tmp_path / "model.safetensors")
    source = QuantizeOnLoad(Checkpoint(tmp_path, torch.float32), "int4")
    with pytest.raises(ModelLoadError, match=r"^tensor model.layers.0.mlp.up_proj: int4 needs finite numbers"):
        source.linear("model.layers.0.mlp.up_proj", (4, 32))
