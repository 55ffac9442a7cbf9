"""Answers of a fleet that are not streamed: they continue behind a dead replica, and each token is charged once."""

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from troupellm import Engine
from troupellm.actors.replicas.fleet import Fleet
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.config.kv_hints import KVHints
from troupellm.protocol.messages.snapshot import TenantSnapshot
from troupellm.protocol.params.outputs import CompletionChoice
from troupellm.tests.faults.test_R_replicas import fleet_of, kill, prompt
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.serving import SPARE_SECONDS, eventually

pytestmark = pytest.mark.anyio

LONG: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 900, "ignore_eos": True}
FIRST = KVHints(replica=0)


async def generated_by(fleet: Fleet, number: int) -> float:
    """Tokens that a replica has drawn."""
    found = text_string_to_metric_families((await fleet.metrics(compat=True)).decode())
    samples = (sample for family in found for sample in family.samples)
    return sum(
        sample.value
        for sample in samples
        if sample.name == "vllm:generation_tokens_total" and sample.labels["engine"] == str(number)
    )


def comparable(choice: CompletionChoice) -> CompletionChoice:
    """Log-probabilities differ in their last bits where a token is computed with others."""
    return msgspec.structs.replace(choice, logprobs=None, cumulative_logprob=None)


async def parts_told(fleet: Fleet) -> None:
    """The fleet has a part of the answer that replica 0 computes."""
    await eventually(lambda: any(each.begun for each in fleet.replicas[0].requests.values()), SPARE_SECONDS)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        pytest.param({"n": 2, "logprobs": 1}, marks=pytest.mark.slow),
        pytest.param({"best_of": 2}, marks=pytest.mark.slow),
    ],
)
async def test_R12_an_answer_that_is_not_streamed_continues_behind_its_dead_replica(
    checkpoint: Any, extra: dict[str, Any]
) -> None:
    sampling = LONG | extra
    async with Engine(checkpoint, **SETTINGS) as engine:
        solo = await engine.generate(prompt(1), **sampling)
    async with (
        fleet_of(checkpoint) as fleet,
        fleet.stream(prompt(1), **sampling, streaming=False, hints=FIRST) as stream,
    ):
        await parts_told(fleet)
        kill(fleet, 0)
        answer = await stream.collect()
        assert [comparable(choice) for choice in answer.choices] == [comparable(choice) for choice in solo.choices]
        for one, other in zip(answer.choices, solo.choices, strict=True):
            told, wanted = ([entry.logprob for entry in each.logprobs or ()] for each in (one, other))
            assert told == pytest.approx(wanted, abs=1e-3)
        assert answer.usage.completion_tokens == solo.usage.completion_tokens
        assert await generated_by(fleet, 1) < solo.usage.completion_tokens


async def test_whole_answers_pooled_prompts_and_ended_requests_are_charged(checkpoint: Any) -> None:
    async with fleet_of(checkpoint, tenants=(TenantConfig(name="a", tokens_per_minute=10**6),)) as fleet:

        def account() -> TenantSnapshot:
            return fleet.snapshot().tenants[0]

        await fleet.generate(prompt(1), **LONG | {"max_tokens": 5}, tenant="a")
        assert (account().prompt_tokens, account().completion_tokens) == (3, 5)
        await fleet.embed([prompt(2)], tenant="a")
        assert (account().prompt_tokens, account().completion_tokens) == (6, 5)
        async with fleet.stream(prompt(1), **LONG, streaming=False, hints=FIRST, tenant="a"):
            await parts_told(fleet)
            drawn = next(iter(fleet.replicas[0].requests.values())).usage().completion_tokens
        await eventually(lambda: account().inside == 0)
        assert account().prompt_tokens == 9
        assert 5 + drawn <= account().completion_tokens < 5 + LONG["max_tokens"]
