"""Layers of different heads that share blocks: every token is the best one of whole forwards of `transformers`.

Two shapes of Gemma 4: with experts, whose layers without a window take values from keys; and with layers that read the
keys and values of others. MiMo-V2: values narrower than keys, and sinks. Prompts cross the window.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

import troupellm
from troupellm.actors.engine.engine import Engine
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import decoder_weights
from troupellm.models.layers.cache_layout import CacheLayout, cache_layout, with_cache_groups
from troupellm.models.layers.decoder import EMBEDDING, Decoder
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.text_models import byte_level
from troupellm.tests.support.gpu.pretended_gpu import pretend_gpu
from troupellm.tests.support.speculation.scripted_drafts import MODULE as DRAFTS
from troupellm.tests.support.workers.meddler import WorkerHosts

pytestmark = pytest.mark.anyio
NEW_TOKENS = 24
CLOSE_CALL = 1e-3
VOCABULARY = 384
SMALL: dict[str, Any] = {"max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 144}
PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "trees": {"method": "custom", "custom_class": f"{DRAFTS}:GuessingTrees", "num_speculative_tokens": 9},
}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


slow = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[pytest.param("gemma4_experts", marks=slow), "gemma4_shared", pytest.param("mimo_v2", marks=slow)],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def chunked(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Llama 4, with chunks of 16 tokens."""
    return made("llama4", tmp_path_factory.mktemp("llama4"))


def made(family: str, folder: Path) -> Pair:
    config = FAMILIES[family]()
    config.vocab_size = VOCABULARY
    if family == "gemma4_shared":
        config.vocab_size_per_layer_input = VOCABULARY
    return Pair(byte_level(folder), config)


def layout_of(pair: Pair) -> CacheLayout:
    return cache_layout(with_cache_groups(pair.config, 144, hybrid=True))


@torch.inference_mode()
def check(pair: Pair, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """Every token is the best one behind those before it, or as good."""
    logits = pair.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    gaps = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
    assert len(answer) == NEW_TOKENS
    assert gaps.max() < CLOSE_CALL


async def ask(engine: troupellm.Engine, prompt: Sequence[int]) -> tuple[int, ...]:
    answer = await engine.generate(prompt, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return answer.token_ids


async def ask_all(engine: troupellm.Engine, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    answers: list[tuple[int, ...]] = [()] * len(prompts)

    async def one(index: int) -> None:
        answers[index] = await ask(engine, prompts[index])

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return answers


async def test_chunks_hits_and_crowds_say_the_same(pair: Pair) -> None:
    """Prompts with a common beginning, one by one and all together, twice, in pieces of 32 tokens."""
    common = make_prompt(70)
    prompts = [[*common[: 30 + 10 * index], *make_prompt(3 + 9 * index, 1)] for index in range(5)]
    async with troupellm.Engine(pair.folder, **SMALL, num_gpu_blocks_override=400) as engine:
        alone = [await ask(engine, prompt) for prompt in prompts]
        assert await ask_all(engine, prompts) == alone
        scheduler = engine.snapshot().scheduler
        assert len(scheduler.cache_groups) == len(layout_of(pair).windows)
        assert scheduler.prefix_hits > 4 * 30
        assert scheduler.blocks_used == 0
    for prompt, answer in zip(prompts, alone, strict=True):
        check(pair, prompt, answer)


async def test_preempted_rows_and_reused_blocks_say_the_same(pair: Pair) -> None:
    """Fewer blocks than the crowd needs. Without a prefix cache, free blocks become NaN at once."""
    prompts = [make_prompt(length) for length in (50, 37, 61, 44)]
    settings = {**SMALL, "max_model_len": 96, "num_gpu_blocks_override": 70, "enable_prefix_caching": False}
    async with troupellm.Engine(pair.folder, **settings, poison_memory="nan") as engine:
        answers = await ask_all(engine, prompts)
        assert engine.snapshot().scheduler.preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        check(pair, prompt, answer)


@slow
async def test_the_runner_of_a_gpu_says_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU as its device, and steps that graphs would hold."""
    pretend_gpu(monkeypatch, sizes=(1, 2, 4))
    prompts = [make_prompt(length) for length in (50, 37)]
    async with troupellm.Engine(pair.folder, **SMALL, num_gpu_blocks_override=200) as engine:
        for prompt, answer in zip(prompts, await ask_all(engine, prompts), strict=True):
            check(pair, prompt, answer)


async def test_prompt_embeds_are_refused_where_layers_read_ids(pair: Pair) -> None:
    embeds = np.zeros((5, pair.config.hidden_size), dtype=np.float32)
    async with troupellm.Engine(pair.folder, **SMALL, num_gpu_blocks_override=200) as engine:
        if pair.config.layer_inputs is None:
            assert (await engine.generate(prompt_embeds=embeds, max_tokens=2, ignore_eos=True)).token_ids
        else:
            with pytest.raises(troupellm.InvalidRequest, match="takes no prompt_embeds") as caught:
                await engine.generate(prompt_embeds=embeds, max_tokens=2)
            assert caught.value.param == "prompt_embeds"


async def test_one_group_for_all_layers_says_the_same(pair: Pair) -> None:
    prompt = make_prompt(60)
    settings = {**SMALL, "num_gpu_blocks_override": 80, "disable_hybrid_kv_cache_manager": True}
    async with troupellm.Engine(pair.folder, **settings) as engine:
        check(pair, prompt, await ask(engine, prompt))


@pytest.mark.parametrize("proposer", [pytest.param("ngram", marks=slow), "trees"])
async def test_drafts_and_lost_workers_change_no_token(pair: Pair, proposer: str) -> None:
    """The worker dies now and then, so that rows are computed again; drafts of trees move within blocks."""
    hosts, steps, prompts = WorkerHosts(), [0], [make_prompt(12) * 4, make_prompt(9) * 5]

    def die_now_and_then(plan: StepPlan) -> None:
        steps[0] += 1
        if steps[0] % 9 == 0:
            raise WorkerGone("as if it were killed", fault=False)

    drafts = {**PROPOSERS[proposer], "adaptive": False}
    settings = {**SMALL, "num_gpu_blocks_override": 200, "speculative_config": drafts}
    async with Engine(str(pair.folder), **settings, worker=hosts) as engine:
        hosts.worker.on_launch = die_now_and_then
        answers = await ask_all(engine, prompts)
        assert engine.snapshot().scheduler.replays > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        check(pair, prompt, answer)


async def test_a_row_is_the_same_to_the_bit_alone_and_in_a_crowd(pair: Pair) -> None:
    prompts, settings = [make_prompt(length) for length in (40, 23, 55)], {**SMALL, "num_gpu_blocks_override": 200}
    options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 2}
    found: list[list[float]] = [[], []]

    async def one(engine: troupellm.Engine, values: list[float]) -> None:
        answer = await engine.generate(prompts[0], **options)
        values += [entry.logprob for entry in answer.choices[0].logprobs or ()]

    async with troupellm.Engine(pair.folder, **settings, batch_invariant=True) as engine:
        await one(engine, found[0])
        async with anyio.create_task_group() as group:
            group.start_soon(one, engine, found[1])
            for prompt in prompts[1:]:
                group.start_soon(ask, engine, prompt)
    assert found[0] == found[1] != []


class Watched:
    """A layer, and how many rows go through it."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.rows = layer, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, update: Any, residual: torch.Tensor, *more: Any) -> Any:
        self.rows.append(residual.shape[0])
        return self.layer(update, residual, *more)


def test_a_prompt_goes_through_layers_that_only_read_with_its_last_token_alone(pair: Pair) -> None:
    layers = pair.decoder.layers
    own = pair.decoder.num_writing
    pair.decoder.layers = [Watched(layer) for layer in layers]  # type: ignore[misc]
    driver = Driver(pair.runner())
    driver.submit(0, make_prompt(50))
    driver.submit(1, make_prompt(31))
    for _ in range(2):  # 40 of 50 tokens, then the rest beside another prompt and its first token
        driver.run({0: 40} if driver.done[0] == 0 else {0: 10, 1: 31})
    seen, pair.decoder.layers = pair.decoder.layers, layers
    assert [layer.rows for layer in seen[:own]] == [[40, 41]] * own
    assert [layer.rows for layer in seen[own:]] == [[2]] * (len(layers) - own)


@pytest.mark.parametrize(("mode", "most"), [("int8", 0.1), ("int4", 0.6)])
def test_weights_in_few_bits_give_nearly_the_same_logits(pair: Pair, mode: Any, most: float) -> None:
    stored, prompt = Checkpoint(pair.folder, torch.float32), make_prompt(40)
    source = QuantizeOnLoad(decoder_weights(pair.config, stored, EMBEDDING), mode)
    other = copy.copy(pair)
    other.decoder = Decoder(pair.config, source, max_model_len=MAX_LEN)
    stored.finish()
    expected = pair.logits(prompt)[-1]
    error = (other.own_logits(prompt) - expected).std() / expected.std()
    assert 0.001 < error < most


def test_blocks_are_shared_without_waste(pair: Pair) -> None:
    layout = layout_of(pair)
    assert set(layout.group_shares) == {1.0}
    assert len(layout.stores) == 1


@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=slow)])
async def test_attention_in_chunks_is_that_of_whole_forwards(chunked: Pair, *, batch_invariant: bool) -> None:
    """Prompts in pieces that end within chunks, prefix hits, drafts across the ends of chunks, reused blocks."""
    prompts = [make_prompt(12) * 4, make_prompt(9) * 5, make_prompt(70), make_prompt(16)]
    settings = {
        **SMALL,
        "num_gpu_blocks_override": 220,
        "speculative_config": {**PROPOSERS["ngram"], "adaptive": False},
    }
    async with troupellm.Engine(chunked.folder, **settings, batch_invariant=batch_invariant) as engine:
        alone = [await ask(engine, prompt) for prompt in prompts]
        assert await ask_all(engine, prompts) == alone
        assert engine.snapshot().scheduler.prefix_hits > 0
        assert len(engine.snapshot().scheduler.cache_groups) == 4
    for prompt, answer in zip(prompts, alone, strict=True):
        check(chunked, prompt, answer)


async def test_blocks_of_earlier_chunks_are_given_back_and_not_read(chunked: Pair) -> None:
    prompts, settings = [make_prompt(length) for length in (50, 37, 61)], {**SMALL, "num_gpu_blocks_override": 160}
    settings |= {"enable_prefix_caching": False, "poison_memory": "nan"}
    async with troupellm.Engine(chunked.folder, **settings) as engine:
        for prompt, answer in zip(prompts, await ask_all(engine, prompts), strict=True):
            check(chunked, prompt, answer)


async def test_settings_that_chunks_do_not_take_are_refused(chunked: Pair) -> None:
    trees = {"method": "medusa", "model": str(chunked.folder), "tree_widths": [2, 2]}
    for settings, said in (
        ({"block_size": 32}, "block_size 32 does not divide the 16 positions"),
        ({"speculative_config": trees}, "tree_widths are not for a model that attends in chunks"),
    ):
        with pytest.raises(ConfigError, match=said):
            async with troupellm.Engine(chunked.folder, **{**SMALL, **settings}):
                pass


async def test_a_gpu_takes_no_context_beyond_a_chunk(chunked: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    with pytest.raises(ConfigError, match="max_model_len must be at most 16 on a GPU"):
        async with troupellm.Engine(chunked.folder, **SMALL):
            pass
    async with troupellm.Engine(chunked.folder, **{**SMALL, "max_model_len": 16}) as engine:
        answer = await engine.generate(make_prompt(10), temperature=0.0, max_tokens=6, ignore_eos=True)
        assert len(answer.token_ids) == 6
