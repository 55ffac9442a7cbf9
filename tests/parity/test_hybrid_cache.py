"""Windows with block tables of their own: the same tokens as with one table for all layers, in fewer blocks."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
import transformers

import troupellm
from troupellm.tests.support.checkpoints.text_models import byte_level

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = 24
NEW_TOKENS = 24
CLOSE_CALL = 1e-4


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Reference:
    """Five layers, one of which keeps everything, and what `transformers` makes of them."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(12)
        config = transformers.Gemma3TextConfig(
            vocab_size=384,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            initializer_range=0.4,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            query_pre_attn_scalar=64,
            sliding_window=WINDOW,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING],
            tie_word_embeddings=False,
        )
        self.folder = byte_level(folder)
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._model.save_pretrained(folder)

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Every token is the best one behind those before it, or as good."""
        logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
        assert len(answer) == NEW_TOKENS
        assert gaps.max() < CLOSE_CALL


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 380, (length,), generator=generator).tolist() for length in lengths]


async def generate_all(engine: troupellm.Engine, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    answers: list[tuple[int, ...]] = [()] * len(prompts)

    async def one(index: int) -> None:
        answer = await engine.generate(prompts[index], temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        answers[index] = answer.token_ids

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return answers


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("hybrid"))


async def most_used(engine: troupellm.Engine, prompt: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """An answer, and the most blocks of each group that were seen in use on the way."""
    most: list[int] = []

    async def watch() -> None:
        while True:
            used = [group.used for group in engine.snapshot().scheduler.cache_groups]
            most[:] = map(max, zip(used, most or used, strict=True))
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        (answer,) = await generate_all(engine, [prompt])
        group.cancel_scope.cancel()
    return answer, most


@pytest.mark.anyio
async def test_a_long_sequence_holds_fewer_blocks_and_says_the_same(reference: Reference) -> None:
    (prompt,) = prompts_of([200])
    settings = {"max_num_batched_tokens": 32, "block_size": 4, "num_gpu_blocks_override": 600}
    async with troupellm.Engine(reference.folder, **settings, disable_hybrid_kv_cache_manager=True) as engine:
        plain, (whole,) = await most_used(engine, prompt)
    async with troupellm.Engine(reference.folder, **settings) as engine:
        answer, (first, *others) = await most_used(engine, prompt)
        names = [group.name for group in engine.snapshot().scheduler.cache_groups]
    reference.check(prompt, answer)
    assert answer == plain
    assert names == [
        f"0-sliding-{WINDOW}",
        f"1-sliding-{WINDOW}",
        f"2-sliding-{WINDOW}",
        f"3-sliding-{WINDOW}",
        "4-full",
    ]
    assert whole > 50
    assert others[-1] == whole
    assert all(used < 25 for used in (first, *others[:-1]))


@pytest.mark.anyio
async def test_prefix_hits_in_a_small_cache(reference: Reference) -> None:
    """Prompts with a common beginning, more of them than the cache can hold, under either arrangement."""
    (common,) = prompts_of([90])
    prompts = [[*common[: 60 + 5 * index], *tail] for index, tail in enumerate(prompts_of([3, 9, 17, 30]))]
    settings = {"max_num_batched_tokens": 48, "block_size": 8, "max_model_len": 144}
    answers = []
    for blocks, disabled in ((150, False), (30, True)):
        async with troupellm.Engine(
            reference.folder, **settings, num_gpu_blocks_override=blocks, disable_hybrid_kv_cache_manager=disabled
        ) as engine:
            first = [await generate_all(engine, [prompt]) for prompt in prompts]
            answers.append([answer for (answer,) in first])
            assert await generate_all(engine, prompts) == answers[-1]
            assert engine.snapshot().scheduler.prefix_hits > 4 * 60
            assert engine.snapshot().scheduler.blocks_used == 0
    assert answers[0] == answers[1]
    for prompt, answer in zip(prompts, answers[0], strict=True):
        reference.check(prompt, answer)


@pytest.mark.anyio
async def test_beams_and_forks_say_the_same_under_either_arrangement(reference: Reference) -> None:
    settings = {"max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 128}
    prompts, answers = prompts_of([50, 61]), []
    for blocks, disabled in ((200, False), (70, True)):
        async with troupellm.Engine(
            reference.folder, **settings, num_gpu_blocks_override=blocks, disable_hybrid_kv_cache_manager=disabled
        ) as engine:
            beams = await engine.generate(
                prompts[0], n=3, use_beam_search=True, temperature=0.0, max_tokens=10, ignore_eos=True
            )
            forks = await engine.generate(prompts[1], n=3, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
            answers.append([choice.token_ids for found in (beams, forks) for choice in found.choices])
            assert engine.snapshot().scheduler.blocks_used == 0
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 6


@pytest.mark.anyio
async def test_blocks_given_back_by_a_window_are_not_read(reference: Reference) -> None:
    """Without a prefix cache, free blocks become NaN at once, and reused ones before they are written."""
    prompts = prompts_of([50, 37, 61])
    settings = {"max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 128, "num_gpu_blocks_override": 160}
    async with troupellm.Engine(
        reference.folder, **settings, enable_prefix_caching=False, poison_memory="nan"
    ) as engine:
        for prompt, answer in zip(prompts, await generate_all(engine, prompts), strict=True):
            reference.check(prompt, answer)
