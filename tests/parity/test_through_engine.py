"""The same greedy tokens as `transformers`, through the whole engine: alone, in a crowd, chunked, preempted, cached.

Reference and engine both run in float32 on the CPU. A mismatch is forgiven only where the reference itself hardly
decides: where its two best logits are closer than 1e-4 at the first differing token, and the engine's log-probabilities
after the same tokens are the reference's. Of the built-in model none is.
"""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
import torch
import transformers

import troupellm
from troupellm.models.hub.source import resolve_model
from troupellm.protocol.config.engine import ModelConfig
from troupellm.tests.support.checkpoints.byte_tokenizer import write_tokenizer
from troupellm.tests.support.checkpoints.close_calls import LIKELIEST, assert_close_call
from troupellm.tests.support.checkpoints.decoder_families import GROWING

COMMON = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**COMMON, head_dim=24, sliding_window=24),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=32),
    "gpt_oss": lambda: transformers.GptOssConfig(**COMMON, head_dim=32, num_local_experts=8, sliding_window=24),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, head_dim=32, query_pre_attn_scalar=64, sliding_window=24, tie_word_embeddings=False
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON,
        head_dim=32,
        query_pre_attn_scalar=64,
        sliding_window=24,
        sliding_window_pattern=2,
        tie_word_embeddings=False,
    ),
    "phi3": lambda: transformers.Phi3Config(**COMMON),
    "granite": lambda: transformers.GraniteConfig(**COMMON, residual_multiplier=0.4, attention_multiplier=0.05),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON),
    "glm4": lambda: transformers.Glm4Config(**COMMON, head_dim=32),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        num_mtp_layers=0,
        kv_lora_rank=32,
        q_lora_rank=40,
        qk_nope_head_dim=24,
        qk_rope_head_dim=16,
        v_head_dim=20,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**COMMON, no_rope_layer_interval=2),
    "ministral3": lambda: transformers.Ministral3Config(**COMMON, head_dim=32, rope_parameters=GROWING),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**COMMON, **ROUTED, use_qk_norm=True),
    "exaone4": lambda: transformers.Exaone4Config(**COMMON, sliding_window=24, sliding_window_pattern=2),
    "cohere2": lambda: transformers.Cohere2Config(
        **COMMON, sliding_window=24, sliding_window_pattern=2, logit_scale=1.0, tie_word_embeddings=False
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON, rotary_pct=0.5),
}
SLOW = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "granite", "olmo2", "glm4", "smollm3", "ministral3",
        "glm4_moe", "exaone4", "cohere2", "gpt_neox")  # fmt: skip
"""Their layers are compared in test_families; what the engine adds to them is the same for all."""
TWO_THREADS = "mistral"
"""Of this one `make test` computes a crowd on two threads. Those of the others would only wait for cores there, beside
other tests; the largest crowds have as many threads as the engine takes by itself."""
LENGTHS = (1, 2, 15, 16, 17, 33, 70)
NEW_TOKENS = 24
QUICK_CROWD = 12
SETTINGS = {"num_threads": 1, "max_num_prefill_tokens": 512}
"""With a fixed number of prompt tokens in a step, which else is measured at each start."""


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop is enough here: what differs between loops is tested with the actors."""
    return "asyncio", {"use_uvloop": True}


BUILTIN = "builtin"
PARAMS = [
    BUILTIN,
    *(pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES),
]


class Reference:
    """A checkpoint and what `transformers` makes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._answers:
            output = self.model.generate(
                torch.tensor([key]),
                attention_mask=torch.ones(1, len(key), dtype=torch.long),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._answers[key] = output[0, len(key) :].tolist()
        return self._answers[key]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """After `tokens`."""
        return self.model(torch.tensor([list(tokens)])).logits[0, -1]

    async def check(self, engine: troupellm.Engine, prompt: Sequence[int], got: Sequence[int]) -> None:
        expected = self.greedy(prompt)
        if list(got) == expected:
            return
        assert len(got) == len(expected)
        where = next(index for index, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
        assert self.name != BUILTIN, f"token {where} is {got[where]}, not {expected[where]}"
        before = [*prompt, *expected[:where]]
        again = await engine.generate(before, temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=LIKELIEST)
        (said,) = again.choices[0].logprobs
        own = {entry.token_id: entry.logprob for entry in (said, *said.top)}
        assert_close_call(where, got[where], self.logits(before), own)

    def prompts(self, lengths: Sequence[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        width = self.model.config.vocab_size
        return [torch.randint(3, width, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module", params=PARAMS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    if request.param == BUILTIN:
        return Reference(BUILTIN, resolve_model(ModelConfig(), lambda _: None))
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(11)
    config = FAMILIES[request.param]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return Reference(request.param, folder)


async def generate_all(
    engine: troupellm.Engine, prompts: Sequence[Sequence[int]], **sampling: object
) -> list[tuple[int, ...]]:
    settings = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **sampling}
    answers: list[tuple[int, ...]] = [()] * len(prompts)

    async def one(index: int) -> None:
        answers[index] = (await engine.generate(prompts[index], **settings)).token_ids

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return answers


@pytest.mark.anyio
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_request_alone_gives_the_tokens_of_transformers(reference: Reference, threads: int) -> None:
    async with troupellm.Engine(reference.folder, **SETTINGS | {"num_threads": threads}) as engine:
        for prompt in reference.prompts(LENGTHS):
            await reference.check(engine, prompt, (await generate_all(engine, [prompt]))[0])


@pytest.mark.anyio
async def test_another_token_is_noticed(reference: Reference) -> None:
    (prompt,) = reference.prompts([20])
    answer = reference.greedy(prompt)
    async with troupellm.Engine(reference.folder, **SETTINGS) as engine:
        await reference.check(engine, prompt, answer)
        for where in (0, NEW_TOKENS - 1):
            wrong = [*answer[:where], (answer[where] + 1) % reference.model.config.vocab_size, *answer[where + 1 :]]
            with pytest.raises(AssertionError, match=f"token {where} is {wrong[where]}"):
                await reference.check(engine, prompt, wrong)


@pytest.mark.anyio
@pytest.mark.parametrize("size", [QUICK_CROWD, *(pytest.param(size, marks=pytest.mark.slow) for size in (20, 64))])
async def test_requests_in_a_crowd_give_the_tokens_of_transformers(reference: Reference, size: int) -> None:
    prompts = reference.prompts([1 + (37 * index) % 90 for index in range(size)])
    few = 2 if reference.name == TWO_THREADS else 1
    async with troupellm.Engine(reference.folder, **SETTINGS | {"num_threads": None if size == 64 else few}) as engine:
        for prompt, got in zip(prompts, await generate_all(engine, prompts), strict=True):
            await reference.check(engine, prompt, got)


@pytest.mark.anyio
async def test_prompts_in_chunks_give_the_tokens_of_transformers(reference: Reference) -> None:
    prompts = reference.prompts([1, 40, 75, 61])
    async with troupellm.Engine(reference.folder, max_num_batched_tokens=7, max_num_seqs=3, **SETTINGS) as engine:
        for prompt, got in zip(prompts, await generate_all(engine, prompts), strict=True):
            await reference.check(engine, prompt, got)


@pytest.mark.anyio
async def test_preempted_requests_give_the_tokens_of_transformers(reference: Reference) -> None:
    prompts = reference.prompts([30, 25, 40, 33, 28, 37])
    num_groups = len(set(getattr(reference.model.config, "layer_types", None) or [""]))
    settings = {"num_gpu_blocks_override": 8 * num_groups, "max_model_len": 64, "enable_prefix_caching": False}
    async with troupellm.Engine(reference.folder, **settings, **SETTINGS) as engine:
        answers = await generate_all(engine, prompts)
        assert engine.snapshot().scheduler.preemptions > 0
        for prompt, got in zip(prompts, answers, strict=True):
            await reference.check(engine, prompt, got)


@pytest.mark.anyio
async def test_with_a_prefix_hit(reference: Reference) -> None:
    (prompt,) = reference.prompts([70])
    longer = [*prompt, 5, 6, 7]
    async with troupellm.Engine(reference.folder, **SETTINGS) as engine:
        await generate_all(engine, [prompt])
        for again in (prompt, longer, prompt[:64]):
            completion = await engine.generate(again, temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
            assert completion.usage.cached_tokens >= 48
            await reference.check(engine, again, completion.token_ids)


@pytest.mark.anyio
async def test_a_seed_gives_the_same_tokens_alone_and_in_the_crowd(reference: Reference) -> None:
    prompts = reference.prompts([9 + (29 * index) % 60 for index in range(24)])
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
    async with troupellm.Engine(reference.folder, **SETTINGS) as engine:
        alone = [(await generate_all(engine, [prompt], seed=5, **sampling))[0] for prompt in prompts[:4]]
    settings = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    async with troupellm.Engine(reference.folder, **settings, **SETTINGS) as engine:
        crowd = await generate_all(engine, prompts, seed=5, **sampling)
        assert crowd[:4] == alone
        assert (await generate_all(engine, [prompts[0]], seed=6, **sampling))[0] != alone[0]
