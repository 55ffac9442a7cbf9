"""Every kind of request goes through a GPU's worker, as engines ask for it, and nothing of it mixes devices."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import transformers

from troupellm import Engine
from troupellm.protocol.params.outputs import Completion
from troupellm.protocol.params.sampling_checks import ThinkingMarks
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.checkpoints.byte_tokenizer import write_tokenizer
from troupellm.tests.support.checkpoints.decoder_families import SIZES
from troupellm.tests.support.checkpoints.deepseek_mtp import write_deepseek
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.gpu.gpu_worker import Gpu, absent_gpu_worker
from troupellm.tests.support.speculation.plain_heads import write_drafters
from troupellm.tests.support.speculation.scripted_drafts import MODULE as DRAFTS
from troupellm.tests.support.workers.plug_ins import MODULE as PLUG_IN_MODULE

pytest.importorskip("triton")
pytestmark = pytest.mark.anyio

SMALL: dict[str, Any] = {
    "dtype": "bfloat16", "block_size": 16, "max_model_len": 160, "max_num_batched_tokens": 48, "max_num_seqs": 6,
    "num_gpu_blocks_override": 40, "kv_cache_memory_bytes": None,
}  # fmt: skip
LONG: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
GUIDE = StructuredOutputsParams(regex="!{4,30}").spec()
PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9},
    "seeded": {"temperature": 0.9, "seed": 3},
    "min_p": {"seed": 3, "min_p": 0.1},
    "top_k": {"seed": 3, "top_k": 7},
    "top_p": {"seed": 3, "top_p": 0.8},
    "all_cuts": {"seed": 3, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "penalties": {"seed": 3, "frequency_penalty": 0.2, "presence_penalty": 0.3, "top_k": 5},
    "logprob": {"temperature": 0.0, "logprobs": 0},
    "penalized_logprob": {"seed": 3, "logprobs": 0, "repetition_penalty": 1.2, "top_p": 0.9},
    "logit_bias": {"temperature": 0.0, "logit_bias": {7: 5.0, 9: -3.0}},
    "allowed": {"seed": 3, "allowed_token_ids": [0, 5, 6]},
    "min_tokens": {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [9], "ignore_eos": False},
    "logprobs": {"seed": 3, "logprobs": 3},
    "all_penalties_logprobs": {"seed": 3, "logprobs": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    "guide": {"seed": 3, "guide": GUIDE},
    "guide_logprobs": {"temperature": 0.0, "guide": GUIDE, "logprobs": 2, "repetition_penalty": 1.1},
    "several": {"seed": 3, "n": 3},
}
"""Sampling parameters that a step applies without waiting for the device."""
DEMANDING: dict[str, dict[str, Any]] = {
    "bad_words": {"temperature": 0.0, "bad_words": ["a", "bcd"]},
    "logprob_token_ids": {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": [4, 8]},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
    "processor": {"temperature": 0.0, "logits_processors": {"OnlyToken": {"token": 0}}},
    "thinking": {
        "temperature": 0.0, "thinking_token_budget": 2, "thinking": ThinkingMarks(start="", end="!!", open=True),
    },
    "beams": {"use_beam_search": True, "n": 2, "temperature": 0.0},
}  # fmt: skip
REQUESTS = PLAIN | DEMANDING
PENALTIES = {"repetition_penalty", "frequency_penalty", "presence_penalty"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = write_drafters(tmp_path_factory.mktemp("drafters"))
    write_deepseek(home / "deepseek")
    write_tokenizer(home / "deepseek", 300)
    return home


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Gpu]:
    found = absent_gpu_worker(monkeypatch)
    yield found
    assert found.launches
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def prompts(count: int) -> list[list[int]]:
    """Some begin as others do."""
    text = np.random.default_rng(3).integers(0, 250, 200).tolist()
    kinds = [text[:5] * 4, text[10:75], text[10:58] + text[90:99], text[60:61], text[:33]]
    return [kinds[number % len(kinds)] for number in range(count)]


def check(answer: Completion, prompt: list[int], wanted: dict[str, Any]) -> None:
    """An answer has all that its request asked for; the numbers of a device that is not there mean nothing."""
    assert len(answer.choices) == wanted.get("n", 1)
    count, listed = wanted.get("logprobs"), wanted.get("logprob_token_ids")
    for choice in answer.choices:
        assert len(choice.token_ids) == wanted["max_tokens"]
        if count is None:
            assert choice.logprobs is None
            continue
        assert choice.logprobs is not None
        assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
        for entry in choice.logprobs:
            assert len(entry.top) == (count if listed is None else len(listed))
            assert listed is None or [top.token_id for top in entry.top] == listed
    if "prompt_logprobs" in wanted:
        assert answer.prompt_logprobs is not None
        first, *others = answer.prompt_logprobs
        assert first is None
        assert [entry.token_id for entry in others if entry is not None] == prompt[1:]


def option_kernels(request: dict[str, Any]) -> dict[str, bool]:
    """The kernels that steps launch for some options of a request, and only for these."""
    return {
        "penalize_kernel": not PENALTIES.isdisjoint(request),
        "keep_bits_kernel": "guide" in request,
        "survey_kernel": not {"top_k", "top_p"}.isdisjoint(request),
        "logprobs_kernel": request.get("logprobs") == 0,
    }


async def ask(engine: Engine, requests: Iterable[dict[str, Any]], times: int = 2) -> None:
    """All of them at once; from the second time on prompts are in the prefix cache."""

    async def one(prompt: list[int], request: dict[str, Any]) -> None:
        check(await engine.generate(prompt, **(LONG | request)), prompt, LONG | request)

    asked = list(requests)
    for _ in range(times):
        async with anyio.create_task_group() as group:
            for prompt, request in zip(prompts(len(asked)), asked, strict=True):
                group.start_soon(one, prompt, request)


def settings(**more: Any) -> dict[str, Any]:
    return SETTINGS | SMALL | {"logits_processors": (f"{PLUG_IN_MODULE}:OnlyToken",)} | more


async def test_plain_steps_do_not_wait(folder: Path, gpu: Gpu) -> None:
    async with Engine(str(folder), **settings()) as engine:
        gpu.waits.clear()
        for name, request in PLAIN.items():
            gpu.launches.clear()
            await ask(engine, [request], times=1)
            assert not gpu.waits, name
            launched, wanted = {launch.kernel.__name__ for launch in gpu.launches}, option_kernels(request)
            assert {kernel: kernel in launched for kernel in wanted} == wanted, name
        await ask(engine, PLAIN.values(), times=1)
    assert not gpu.waits


def latent_launches(gpu: Gpu) -> int:
    """Launches of attention to latent vectors since the last call; a prompt whose keys are expanded has none."""
    count = sum(launch.kernel.__name__ == "latent_kernel" for launch in gpu.launches)
    gpu.launches.clear()
    return count


@pytest.mark.slow
async def test_prompts_with_latent_attention_do_not_wait(drafters: Path, gpu: Gpu) -> None:
    """Long prompts, whose keys are expanded, alone and beside short ones, which attend to latent vectors."""
    text = np.random.default_rng(4).integers(0, 250, 90).tolist()
    wide = settings(max_num_batched_tokens=128)
    async with Engine(str(drafters / "deepseek"), **wide) as engine:
        gpu.waits.clear()
        gpu.launches.clear()
        await engine.generate(text[:80], max_tokens=1, ignore_eos=True)
        assert latent_launches(gpu) == 0
        await engine.generate(text[80:], max_tokens=1, ignore_eos=True)
        assert latent_launches(gpu) > 0
        async with anyio.create_task_group() as group:
            group.start_soon(ask, engine, [PLAIN["greedy"], PLAIN["drawn"], PLAIN["top_p"]])
            await engine.generate(text[10:], **LONG)
    assert not gpu.waits


async def test_every_kind_of_request_is_answered_in_full(folder: Path, gpu: Gpu) -> None:
    async with Engine(str(folder), **settings(max_num_seqs=40, num_gpu_blocks_override=100)) as engine:
        for request in DEMANDING.values():
            await ask(engine, [request], times=1)
        await ask(engine, REQUESTS.values())
    assert not [wait for wait in gpu.waits if "repeat_interleave" in wait]  # the host knows how many there are


MIXED = [REQUESTS[name] for name in ("greedy", "all_cuts", "penalized_logprob", "logit_bias", "guide", "several")]
SERVED: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "sizes": {"cudagraph_capture_sizes": (2, 3)},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "preempted": {"num_gpu_blocks_override": 10},
    "one_at_a_time": {"async_scheduling": False},
    "no_prefix_cache": {"enable_prefix_caching": False},
    "poison": {"poison_memory": "nan"},
    "invariant": {"batch_invariant": True},
    "fp8_cache": {"kv_cache_dtype": "fp8"},
    "int8_cache": {"kv_cache_dtype": "int8"},
    "sdpa": {"attention_backend": "sdpa"},
    "flex": {"attention_backend": "flex"},
    "reference": {"attention_backend": "reference"},
    "sdpa_fp8": {"attention_backend": "sdpa", "kv_cache_dtype": "fp8"},
    "flex_int8": {"attention_backend": "flex", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8_weight_only": {"quantization": "int8-weight-only"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "fp8_invariant": {"quantization": "fp8", "batch_invariant": True},
    "dummy": {"load_format": "dummy", "quantization": "int4"},
    "offload": {"kv_offloading_size": "1MiB", "num_gpu_blocks_override": 12},
    "swap": {"kv_offloading_size": "1MiB", "num_gpu_blocks_override": 10, "preemption_mode": "offload"},
}


PREEMPTED = ("preempted", "swap")


def cases(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases(SERVED, ("fp8_cache",)))
async def test_mixed_requests_are_answered_with_each_setting(folder: Path, gpu: Gpu, name: str) -> None:
    async with Engine(str(folder), **settings(**SERVED[name])) as engine:
        await ask(engine, MIXED)
        if name in PREEMPTED:
            await ask(engine, [request | {"max_tokens": 24} for request in MIXED], times=1)
            assert engine.snapshot().scheduler.preemptions


METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 3},
    "suffix": {},
    "draft_model": {"model": "small"},
    "draft_model_drawn": {"model": "small", "draft_sample_method": "probabilistic"},
    "draft_model_int8": {"model": "small", "quantization": "int8"},
    "eagle": {"model": "eagle"},
    "eagle_adaptive": {"model": "eagle", "adaptive": True},
    "eagle_tree": {"model": "eagle", "tree_widths": [3, 2, 2]},
    "eagle3": {"model": "eagle3"},
    "medusa": {"model": "medusa"},
    "medusa_tree": {"model": "medusa", "tree_widths": [3, 4]},
    "mtp": {},
    "custom": {"custom_class": f"{DRAFTS}:Guessing"},
    "custom_tree": {"custom_class": f"{DRAFTS}:GuessingTrees"},
}
KINDS = ("ngram", "suffix", "draft_model", "eagle3", "eagle", "medusa", "mtp", "custom")


@pytest.mark.parametrize("name", cases(METHODS, ("medusa",)))
async def test_drafts_of_every_method_are_verified(drafters: Path, gpu: Gpu, name: str) -> None:
    method = next(kind for kind in KINDS if name.startswith(kind))
    target = drafters / ("deepseek" if method == "mtp" else "target")
    wanted = {"method": method, "num_speculative_tokens": 3, "adaptive": False} | METHODS[name]
    if "tree_widths" in wanted:
        del wanted["num_speculative_tokens"]
    if "model" in wanted:
        wanted["model"] = str(drafters / wanted["model"])
    async with Engine(str(target), **settings(speculative_config=wanted)) as engine:
        await ask(engine, [request | {"max_tokens": 8} for request in (*MIXED, REQUESTS["prompt_logprobs"])])
        await engine.sleep(2)
        await engine.wake()
        await ask(engine, MIXED)
        # Adaptive drafting may find that drafts are not worth their time.
        assert engine.snapshot().scheduler.draft_tokens > 0 or wanted["adaptive"]


async def test_vectors_and_prompts_of_embeddings_are_computed_beside_answers(folder: Path, gpu: Gpu) -> None:
    async with Engine(str(folder), **settings()) as engine, anyio.create_task_group() as group:
        group.start_soon(ask, engine, MIXED)
        vectors = await engine.embed(["a fox", "x y z", "0123456789 " * 9])
        answer = await engine.generate(prompt_embeds=torch.zeros(70, 32), **LONG)
    assert [len(vector) for vector in vectors] == [32] * 3
    assert len(answer.token_ids) == LONG["max_tokens"]


@pytest.mark.slow
async def test_requests_are_answered_after_sleep_and_abort(folder: Path, gpu: Gpu) -> None:
    async with Engine(str(folder), **settings(kv_offloading_size="1MiB")) as engine:
        await ask(engine, MIXED)
        for level in (1, 2):
            await engine.sleep(level)
            await engine.wake()
            await ask(engine, MIXED)
        async with engine.stream([40, 41], max_tokens=100, ignore_eos=True) as stream:
            await anext(stream)
        await ask(engine, MIXED)


async def test_a_classifier_gives_each_label_a_score(tmp_path: Path, gpu: Gpu) -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**SIZES, num_labels=3)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, SIZES["vocab_size"])
    async with Engine(str(tmp_path), **settings()) as engine:
        labels = await engine.classify(["a fox", "0123456789 " * 9])
    assert [len(found) for found in labels] == [3, 3]
