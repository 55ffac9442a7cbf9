"""Speculation changes no token: every kind of request through the whole engine, with every kind of proposer.

Crowds, prompts in pieces, prefix hits, blocks that do not suffice, and workers that die now and then: what is asked for
alone and without speculation is what comes.
"""

from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.params.sampling_checks import ThinkingMarks
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.engines.fixtures import checkpoint, tiny_engine
from troupellm.tests.support.servers.serving import eventually
from troupellm.tests.support.speculation.plain_heads import write_drafters
from troupellm.tests.support.speculation.scripted_drafts import MODULE as DRAFTS
from troupellm.tests.support.workers.meddler import WorkerHosts

__all__ = ["checkpoint", "tiny_engine"]
pytestmark = pytest.mark.anyio

ASKS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with log-probabilities": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "seeded": {"seed": 7, "temperature": 1.3},
    "cut off": {"seed": 12, "temperature": 1.0, "top_p": 0.9, "top_k": 30, "min_p": 0.02, "logprobs": 1},
    "seeded forks": {"seed": 8, "temperature": 1.1, "n": 3, "logprobs": 2},
    "penalties": {
        "seed": 9, "temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.6,
    },
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2},
    "a thinking budget": {
        "seed": 10, "n": 2, "thinking_token_budget": 4, "thinking": ThinkingMarks(start="", end="</t>", open=True),
    },
    "bias and a floor": {"temperature": 0.0, "logit_bias": {20: 4.0, 21: 3.5}, "min_tokens": 10},
    "few words": {"seed": 13, "allowed_token_ids": [65, 66, 67], "bad_words": ["AB", "C"]},
    "a stop string": {"seed": 14, "allowed_token_ids": [65, 66, 67], "stop": ["BA", "CC"], "min_tokens": 2},
    "a guide": {
        "seed": 15, "structured_outputs": StructuredOutputsParams(regex="(ab|cd){3,9}(yes it is so|no)"),
        "ignore_eos": False,
    },
    "a guided choice": {
        "temperature": 0.0, "structured_outputs": StructuredOutputsParams(choice=["the first one", "the second one"]),
        "ignore_eos": False, "logprobs": 1,
    },
}  # fmt: skip
TOKENS = 24


PROPOSERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "chains": {"method": "custom", "custom_class": f"{DRAFTS}:Guessing", "num_speculative_tokens": 5},
    "trees": {"method": "custom", "custom_class": f"{DRAFTS}:GuessingTrees", "num_speculative_tokens": 9},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "itself": {"method": "draft_model", "model": "target", "draft_sample_method": "probabilistic"},
    "a draft model": {"method": "draft_model", "model": "small", "num_speculative_tokens": 2},
    "EAGLE": {"method": "eagle", "model": "eagle", "draft_sample_method": "probabilistic"},
    "trees of EAGLE": {"method": "eagle", "model": "eagle", "tree_widths": [3, 3, 2]},
    "EAGLE-3": {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 4},
    "trees of Medusa": {"method": "medusa", "model": "medusa", "tree_widths": [2, 4, 3]},
}
"""Models; `model` is a folder of the fixture `drafters`. Random ones are right by accident only."""
SITUATIONS: dict[str, dict[str, Any]] = {
    "room for all": {},
    "pieces, and too few blocks": {
        "max_num_batched_tokens": 32, "max_num_seqs": 9, "num_gpu_blocks_override": 18, "kv_cache_memory_bytes": None,
        "max_model_len": 128, "block_size": 8,
    },
    "deaths": {"max_num_batched_tokens": 64},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 5, "poison_memory": "nan"},
}  # fmt: skip
QUICK = (
    *((proposer, "pieces, and too few blocks") for proposer in ("ngram", "suffix", "trees of EAGLE")),
    ("trees", "deaths"),
    ("trees", "no prefix cache"),
)


async def streamed(engine: Any, number: int, fields: dict[str, Any]) -> dict[int, list[Any]]:
    """Per choice: tokens, text, and log-probabilities as (token, value)."""
    parts: dict[int, list[Any]] = {}
    options = {"max_tokens": TOKENS, "ignore_eos": True, **fields}
    prompt = [30 + number, *(5 + (3 * place + number) % 11 for place in range(20 + number))]
    async with engine.stream(prompt, **options) as stream:
        async for delta in stream:
            tokens, text, logprobs = parts.setdefault(delta.index, [[], [], []])
            tokens.extend(delta.token_ids)
            text.append(delta.text)
            logprobs.extend((entry.token_id, entry.logprob) for entry in delta.logprobs or ())
    return {index: [tokens, "".join(text), logprobs] for index, (tokens, text, logprobs) in parts.items()}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def solo(anyio_backend: object, checkpoint: Any) -> dict[str, Any]:
    from troupellm.actors.engine.engine import Engine
    from troupellm.tests.support.engines.fixtures import SETTINGS

    async with Engine(str(checkpoint), **SETTINGS) as engine:
        return {name: await streamed(engine, number, ASKS[name]) for number, name in enumerate(ASKS)}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafters(tmp_path_factory.mktemp("drafters"))


def check_same(name: str, found: dict[int, list[Any]], right: dict[int, list[Any]]) -> None:
    assert found.keys() == right.keys()
    for index, (tokens, text, logprobs) in found.items():
        assert tokens == right[index][0], name
        assert text == right[index][1], name
        assert [token for token, _ in logprobs] == [token for token, _ in right[index][2]], name
        assert [value for _, value in logprobs] == pytest.approx([value for _, value in right[index][2]], abs=1e-4)


@pytest.mark.parametrize(
    ("proposer", "situation"),
    [
        pytest.param(proposer, situation, marks=() if (proposer, situation) in QUICK else pytest.mark.slow)
        for proposer in (*PROPOSERS, *DRAFTERS)
        for situation in SITUATIONS
    ],
)
async def test_the_tokens_are_those_without(
    tiny_engine: Any, solo: Any, drafters: Path, proposer: str, situation: str
) -> None:
    hosts, steps = WorkerHosts(), [0]
    wanted = PROPOSERS.get(proposer) or DRAFTERS[proposer] | {"model": str(drafters / DRAFTERS[proposer]["model"])}
    settings = {**SITUATIONS[situation], "speculative_config": {**wanted, "adaptive": False}}
    drafted = [0, 0]

    def die_now_and_then(plan: StepPlan) -> None:
        steps[0] += 1
        if steps[0] % 9 == 0:
            raise WorkerGone("somebody killed it", fault=False)

    def count(result: Any) -> Any:
        drafted[0], drafted[1] = drafted[0] + sum(result.drafted), drafted[1] + sum(result.accepted)
        return result

    async with tiny_engine(worker=hosts, **settings) as engine:
        hosts.worker.on_result = count
        if situation == "deaths":
            hosts.worker.on_launch = die_now_and_then
        with anyio.fail_after(120):
            for _ in range(2):  # the second time with prefixes that are known
                found: dict[str, Any] = {}

                async def ask(number: int, name: str, found: dict[str, Any] = found) -> None:
                    found[name] = await streamed(engine, number, ASKS[name])

                async with anyio.create_task_group() as group:
                    for number, name in enumerate(ASKS):
                        group.start_soon(ask, number, name)
                for name in ASKS:
                    check_same(name, found[name], solo[name])
        snapshot = engine.snapshot().scheduler
        if situation == "deaths":
            assert snapshot.replays > 0
        if "too few" in situation:
            assert snapshot.preemptions > 0
        await eventually(lambda: not engine.snapshot().scheduler.blocks_used)
    assert drafted[0] > 50
    assert drafted[1] > 0 or proposer in DRAFTERS
    if proposer == "itself":
        assert drafted[1] > drafted[0] / 4
