"""Input embeddings instead of a prompt: only for an engine in the caller's own process, and the same on every path."""

import anyio
import pytest
from tokenizers import pre_tokenizers

from troupellm import LLM, SamplingParams
from troupellm.actors.admission.embeds_prompt import as_embeds
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.front_pair import front_pair
from troupellm.tests.support.workers.meddler import WorkerHosts

pytestmark = pytest.mark.anyio

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""By token id, in the tiny model's tokenizer."""


@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 16}, {}, pytest.param({"worker_process": True}, marks=pytest.mark.slow)],
    ids=["chunked", "thread", "process"],
)
async def test_embeddings_of_tokens_give_the_answer_of_the_tokens(tiny_engine, checkpoint, settings):
    import numpy as np
    from safetensors.numpy import load_file

    table = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    ids = [*range(40, 80)]
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    async with tiny_engine(**settings) as engine:
        wanted = (await engine.generate(ids, n=2, **options)).token_ids
        await engine.reset_prefix_cache()
        zeros = await engine.generate([0] * len(ids), **options)
        for _ in range(2):  # the second finds its prompt in the prefix cache
            found = await engine.generate(prompt_embeds=table[ids], n=2, **options)
            assert [choice.token_ids for choice in found.choices] == [wanted] * 2
        assert found.usage.cached_tokens > 0
        other = await engine.generate(prompt_embeds=table[ids][::-1].copy(), **options)
        assert other.usage.cached_tokens == 0
        assert (await engine.generate([0] * len(ids), **options)).token_ids == zeros.token_ids
        penalised = await engine.generate(prompt_embeds=table[ids], **options, repetition_penalty=1.5)
        assert len(penalised.token_ids) == 12
        for wrong in (table[ids][:, :-1], table[0], "text", np.full((2, 32), np.nan, np.float32), b"raw"):
            with pytest.raises(InvalidRequest) as caught:
                await engine.generate(prompt_embeds=wrong, **options)
            assert caught.value.param == "prompt_embeds"
        with pytest.raises(InvalidRequest):
            await engine.generate("text too", prompt_embeds=table[ids], **options)
        with pytest.raises(InvalidRequest, match="prompt_embeds are for generation"):
            await engine.embed([as_embeds(table[ids])])
        if not settings:
            async with front_pair(engine) as pair:
                with pytest.raises(InvalidRequest, match="caller's own process"):
                    await pair.remote.generate(prompt_embeds=table[ids], **options)


@pytest.mark.parametrize("caching", [True, False])
async def test_embeddings_survive_preemption_and_the_loss_of_the_worker(tiny_engine, checkpoint, caching):
    from safetensors.numpy import load_file

    table = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    prompts = [[40 + number, *range(9, 21), 3] for number in range(7)]
    options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    async with tiny_engine() as engine:
        wanted = [(await engine.generate(ids, **options)).token_ids for ids in prompts]
    hosts, steps = WorkerHosts(), [0]
    settings = {"num_gpu_blocks_override": 26, "block_size": 4, "enable_prefix_caching": caching, "max_model_len": 96}
    async with tiny_engine(worker=hosts, **settings) as engine:

        def die_now_and_then(plan: StepPlan) -> None:
            steps[0] += 1
            if steps[0] in (9, 40):
                raise WorkerGone("somebody killed it", fault=False)

        hosts.worker.on_launch = die_now_and_then
        found: dict[int, tuple[int, ...]] = {}

        async def ask(number: int) -> None:
            completion = await engine.generate(prompt_embeds=table[prompts[number]], n=1 + number % 2, **options)
            assert len({choice.token_ids for choice in completion.choices}) == 1
            found[number] = completion.token_ids

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(len(prompts)):
                    group.start_soon(ask, number)
        snapshot = engine.snapshot().scheduler
        assert [found[number] for number in range(len(prompts))] == wanted
        assert snapshot.preemptions > 0
        assert snapshot.worker_losses == 2


def test_scripts_give_embeddings_and_templates_too(checkpoint):
    from safetensors.numpy import load_file

    table = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    ids, params = [LETTERS.index(letter) for letter in "Hello"], SamplingParams(temperature=0, max_tokens=5)
    with LLM(str(checkpoint), **SETTINGS) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids}, {"prompt_embeds": table[ids]}], params, use_tqdm=False)
        assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
        messages = [{"role": "user", "content": "Hello"}]
        [chat] = llm.chat(messages, params, use_tqdm=False, chat_template="{{ messages[0].content }}")
        assert chat.prompt_token_ids == ids
        assert chat.outputs[0].token_ids == outputs[0].outputs[0].token_ids
