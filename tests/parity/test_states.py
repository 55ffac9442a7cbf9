"""Models with states beside keys and values, through the whole engine, against whole forwards of `transformers`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers

import troupellm
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.errors import ConfigError, InvalidRequest
from troupellm.protocol.messages.snapshot import StatesSnapshot
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.checkpoints.text_models import byte_level
from troupellm.tests.support.workers.meddler import WorkerHosts

NEW_TOKENS = 24
CLOSE_CALL = 1e-4
BLOCK = 16
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""An answer begins with a mark that the next turn does not show."""


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


SIZES = {
    "vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "initializer_range": 0.4, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TOKENS = {name: SIZES[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
LINEAR = "linear_attention"
CONFIGS = {
    "lfm2": lambda: transformers.Lfm2Config(
        **SIZES, block_multiple_of=16, layer_types=["conv", "full_attention", "conv", "conv"]
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **SIZES,
        head_dim=32,
        layer_types=[LINEAR, "full_attention", LINEAR, LINEAR],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
    ),
    "granite4_hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **SIZES,
        layer_types=[LINEAR, "full_attention", LINEAR, LINEAR],
        num_local_experts=0,
        shared_intermediate_size=112,
        embedding_multiplier=7.0,
        residual_multiplier=0.4,
        attention_multiplier=0.05,
        logits_scaling=5.0,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=24,
        time_step_limit=(0.1, 1.5),
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=384,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=4,
        head_dim=32,
        n_groups=2,
        state_size=24,
        initializer_range=0.4,
        time_step_limit=(0.1, 1.5),
        **TOKENS,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=112,
        layers_block_type=[LINEAR, "mlp", LINEAR, "full_attention", "mlp", LINEAR],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=24,
        time_step_min=0.3,
        max_position_embeddings=8192,
        initializer_range=0.4,
        rescale_prenorm_residual=False,
        **TOKENS,
    ),
}
SLOW = ("qwen3_5", "granite4_hybrid", "mamba2", "nemotron_h")


class Reference:
    """A small model with states, and what `transformers` makes of it."""

    def __init__(self, folder: Path, config: transformers.PretrainedConfig) -> None:
        torch.manual_seed(12)
        self.folder = byte_level(folder)
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._model.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Every token is the best one behind those before it, or as good."""
        logits = self._model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits[torch.arange(len(answer)), torch.tensor(answer)]
        assert answer
        assert gaps.max() < CLOSE_CALL


def prompts_of(lengths: Sequence[int], seed: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 380, (length,), generator=generator).tolist() for length in lengths]


async def generate(engine: troupellm.Engine, prompt: Sequence[int], **sampling: Any) -> troupellm.Completion:
    settings = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **sampling}
    return await engine.generate(list(prompt), **settings)


async def generate_all(
    engine: troupellm.Engine, prompts: Sequence[Sequence[int]], **sampling: Any
) -> list[tuple[int, ...]]:
    answers: list[tuple[int, ...]] = [()] * len(prompts)

    async def one(index: int) -> None:
        answers[index] = (await generate(engine, prompts[index], **sampling)).token_ids

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return answers


def states(engine: troupellm.Engine) -> StatesSnapshot:
    found = engine.snapshot().scheduler.states
    assert found is not None
    return found


@pytest.fixture(scope="module", params=["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp(request.param), CONFIGS[request.param]())


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("lfm2"), CONFIGS["lfm2"]())


@pytest.mark.anyio
@pytest.mark.parametrize("pattern", ["nan", "0x7f"])
async def test_a_crowd_says_what_each_says_alone_over_poisoned_memory(reference: Reference, pattern: str) -> None:
    prompts = prompts_of([1, 2, 15, 16, 17, 33, 70, 90])
    settings = {"num_threads": 1, "max_num_seqs": 4, "num_gpu_blocks_override": 200, "poison_memory": pattern}
    async with troupellm.Engine(reference.folder, **settings) as engine:
        for prompt, answer in zip(prompts, await generate_all(engine, prompts), strict=True):
            reference.check(prompt, answer)
        assert states(engine).used == 0
        assert await generate_all(engine, prompts[3:5]) == [(await generate(engine, p)).token_ids for p in prompts[3:5]]


@pytest.mark.anyio
@pytest.mark.parametrize("chunk", [7, 16, pytest.param(64, marks=pytest.mark.slow), 65])
async def test_prompts_in_chunks(reference: Reference, chunk: int) -> None:
    prompts = prompts_of([1, 100, 175, 61])
    settings = {"max_num_batched_tokens": chunk, "max_num_seqs": 3, "num_threads": 1, "state_snapshot_interval": 32}
    async with troupellm.Engine(reference.folder, **settings) as engine:
        for prompt, answer in zip(prompts, await generate_all(engine, prompts), strict=True):
            reference.check(prompt, answer)


@pytest.mark.anyio
@pytest.mark.parametrize("caching", [True, False])
async def test_preempted_requests(reference: Reference, caching: bool) -> None:
    prompts = prompts_of([30, 25, 40, 33, 28, 37])
    settings = {"num_gpu_blocks_override": 8, "max_model_len": 64, "enable_prefix_caching": caching, "num_threads": 1}
    async with troupellm.Engine(reference.folder, **settings) as engine:
        answers = await generate_all(engine, prompts)
        assert engine.snapshot().scheduler.preemptions > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            reference.check(prompt, answer)


@pytest.mark.anyio
async def test_prefixes_are_found_at_every_kind_of_snapshot(reference: Reference) -> None:
    (prompt,) = prompts_of([300])
    other, ending = prompts_of([40, 5], seed=8)
    async with troupellm.Engine(reference.folder, state_snapshot_interval=64, num_threads=1) as engine:
        first = await generate(engine, prompt)
        reference.check(prompt, first.token_ids)
        turns = {
            "the end of the prompt": ([*prompt, *other], 288),
            "the interval": ([*prompt[:200], *other], 192),
            "the end of the answer": ([*prompt, *first.token_ids, *ending], 300 + NEW_TOKENS - 1),
            "the interval in the answer": ([*prompt, *first.token_ids[:21], *other], 320),
            "none": ([*prompt[:60], *other], 0),
        }
        for name, (turn, cached) in turns.items():
            found = await generate(engine, turn)
            assert (name, found.usage.cached_tokens) == (name, cached)
            reference.check(turn, found.token_ids)


@pytest.mark.anyio
async def test_a_second_turn_of_a_long_chat_computes_its_new_tokens(reference: Reference) -> None:
    """With a template that does not show again how the first answer began: the last message's end is the border."""
    document = " ".join(f"fact {number} of many" for number in range(260))
    first = [{"role": "user", "content": document}]
    async with troupellm.Engine(reference.folder, num_threads=1, max_model_len=8192) as engine:
        async with engine.chat(first, max_tokens=8, temperature=0.0, ignore_eos=True) as stream:
            answer = await stream.collect()
        second = [*first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And the others?"}]
        async with engine.chat(second, max_tokens=8, temperature=0.0, ignore_eos=True) as stream:
            again = await stream.collect()
    old, new = answer.usage.prompt_tokens, again.usage.prompt_tokens
    assert old > 4000
    assert again.usage.prompt_tokens - again.usage.cached_tokens <= new - old + 64
    reference.check(again.prompt_token_ids, again.token_ids)


@pytest.mark.anyio
async def test_forks_say_the_same_with_and_without_snapshots(reference: Reference) -> None:
    (prompt,) = prompts_of([100])
    answers = []
    for caching in (True, False):
        async with troupellm.Engine(reference.folder, enable_prefix_caching=caching, num_threads=1) as engine:
            forks = await generate(engine, prompt, n=3, temperature=1.0, seed=5)
            answers.append([choice.token_ids for choice in forks.choices])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 3


@pytest.mark.anyio
async def test_streams_go_on_after_the_worker_was_lost(reference: Reference) -> None:
    prompts = prompts_of([50, 21, 90])
    hosts, steps = WorkerHosts(), [0]

    def die_now_and_then(plan: StepPlan) -> None:
        steps[0] += 1
        if steps[0] % 9 == 0:
            raise WorkerGone("it was killed", fault=False)

    async with troupellm.Engine(reference.folder, worker=hosts, num_threads=1, state_snapshot_interval=32) as engine:
        hosts.worker.on_launch = die_now_and_then
        answers = await generate_all(engine, prompts)
        assert engine.snapshot().scheduler.replays > 1
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.check(prompt, answer)


@pytest.mark.anyio
async def test_sleep_drops_all_states(reference: Reference) -> None:
    (prompt,) = prompts_of([120])
    async with troupellm.Engine(reference.folder, num_threads=1) as engine:
        before = await generate(engine, prompt)
        assert states(engine).snapshots > 0
        await engine.sleep(level=1)
        await engine.wake()
        assert states(engine).snapshots == 0
        again = await generate(engine, prompt)
    assert again.usage.cached_tokens == 0
    assert again.token_ids == before.token_ids


@pytest.mark.anyio
async def test_eight_bits_say_the_same_in_any_cut(lfm2: Reference) -> None:
    prompts = prompts_of([100, 40])
    answers = []
    for chunk in (2048, 24):
        settings = {"quantization": "int8", "max_num_batched_tokens": chunk, "num_threads": 1, "batch_invariant": True}
        async with troupellm.Engine(lfm2.folder, **settings) as engine:
            answers.append(await generate_all(engine, prompts))
            answers.append([(await generate(engine, prompt)).token_ids for prompt in prompts])
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.anyio
async def test_a_batch_invariant_engine_says_the_same_to_the_bit(lfm2: Reference) -> None:
    prompts = prompts_of([70, 33, 12])
    found = []
    for chunk, caching in ((2048, False), (19, True)):
        settings = {"batch_invariant": True, "max_num_batched_tokens": chunk, "enable_prefix_caching": caching}
        async with troupellm.Engine(lfm2.folder, num_threads=1, **settings) as engine:
            await generate_all(engine, prompts)
            told = await generate(engine, prompts[0], logprobs=3)
            found.append([entry.logprob for entry in told.choices[0].logprobs])
    assert found[0] == found[1]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "drafts cannot take back yet"),
        ({"enable_lora": True}, "adapters for their layers"),
        ({"max_num_seqs": 2**31 - 1}, "bytes of states, 1536 for each sequence"),
    ],
    ids=["drafts", "adapters", "rows"],
)
async def test_settings_that_do_not_go_with_states(lfm2: Reference, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with troupellm.Engine(lfm2.folder, **settings):
            pass


@pytest.mark.anyio
async def test_gated_delta_nets_are_not_batch_invariant(tmp_path: Path) -> None:
    reference = Reference(tmp_path, CONFIGS["qwen3_5"]())
    with pytest.raises(ConfigError, match="sums that depend on how prompts are cut"):
        async with troupellm.Engine(reference.folder, batch_invariant=True):
            pass


@pytest.mark.anyio
async def test_beams_are_refused_and_cost_others_nothing(lfm2: Reference) -> None:
    (prompt,) = prompts_of([20])
    async with troupellm.Engine(lfm2.folder, num_threads=1) as engine:
        with pytest.raises(InvalidRequest, match="use_beam_search is not there yet for models with states"):
            await generate(engine, prompt, n=2, use_beam_search=True)
        lfm2.check(prompt, (await generate(engine, prompt)).token_ids)


@pytest.mark.anyio
@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"disable_hybrid_kv_cache_manager": True}])
async def test_settings_of_the_kv_cache_go_with_states(lfm2: Reference, settings: dict[str, Any]) -> None:
    prompts = prompts_of([90, 20])
    answers = []
    for chunk in (2048, 16):
        async with troupellm.Engine(lfm2.folder, num_threads=1, max_num_batched_tokens=chunk, **settings) as engine:
            answers.append(await generate_all(engine, prompts))
            again = await generate(engine, prompts[0])
            assert again.usage.cached_tokens >= 64
            assert again.token_ids == answers[-1][0]
    if "kv_cache_dtype" not in settings:
        for prompt, answer in zip(prompts, answers[0], strict=True):
            lfm2.check(prompt, answer)
        assert answers[0] == answers[1]
