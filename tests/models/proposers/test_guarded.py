"""A plug-in that fails costs drafts: no request, and no worker. Through the whole engine."""

import logging
from typing import Any

import pytest

from troupellm.tests.support.engines.fixtures import anyio_backend, checkpoint, tiny_engine
from troupellm.tests.support.speculation.scripted_drafts import MODULE as DRAFTS

__all__ = ["anyio_backend", "checkpoint", "tiny_engine"]
pytestmark = pytest.mark.anyio


async def tokens_of(engine: Any) -> list[int]:
    async with engine.stream([30, *[32] * 12], max_tokens=30, temperature=1.0, seed=3, ignore_eos=True) as stream:
        return [token async for delta in stream for token in delta.token_ids]


@pytest.mark.parametrize("kind", ["Failing", "TooMany", "Fractions", "Blind"])
async def test_a_plug_in_that_fails_is_not_asked_again(
    tiny_engine: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with tiny_engine() as engine:
        right = await tokens_of(engine)
    wanted = {
        "method": "custom",
        "custom_class": f"{DRAFTS}:{kind}",
        "num_speculative_tokens": 3,
        "adaptive": False,
    }
    with caplog.at_level(logging.ERROR, "troupellm.worker"):
        async with tiny_engine(speculative_config=wanted) as engine:
            assert await tokens_of(engine) == right
            drafted = engine.snapshot().scheduler.draft_tokens
            assert await tokens_of(engine) == right
            snapshot = engine.snapshot().scheduler
    assert snapshot.draft_tokens == drafted
    assert (drafted > 0) == (kind != "Blind"), "that one is shown the prompt before it is asked"
    assert snapshot.replays == 0
    assert snapshot.proposer.failures == 1
    assert [record.message for record in caplog.records if "has failed" in record.message] == [
        f"the proposer {DRAFTS}:{kind} has failed: nothing is drafted until the model is loaded again"
    ]


async def test_failures_are_counted_over_sleeps_and_one_that_works_has_none(tiny_engine: Any) -> None:
    wanted = {
        "method": "custom", "custom_class": f"{DRAFTS}:Failing", "num_speculative_tokens": 3, "adaptive": False,
    }  # fmt: skip
    async with tiny_engine(speculative_config=wanted) as engine:
        assert engine.snapshot().scheduler.proposer.failures == 0
        for failures in (1, 2):
            await tokens_of(engine)
            await tokens_of(engine)
            assert engine.snapshot().scheduler.proposer.failures == failures
            await engine.sleep(level=1)
            await engine.wake()
    async with tiny_engine(speculative_config=wanted | {"custom_class": f"{DRAFTS}:Guessing"}) as engine:
        await tokens_of(engine)
        assert engine.snapshot().scheduler.proposer.failures == 0


async def test_what_suffix_keeps_is_told(tiny_engine: Any) -> None:
    async with tiny_engine(speculative_config={"method": "suffix"}) as engine:
        for kept in (0, 1, 2):
            await tokens_of(engine)
            told = engine.snapshot().scheduler.proposer
            assert told.past_outputs == kept, "an output is kept with the plan behind its end"
            assert (told.past_tokens > 0) == (kept > 0)
            assert told.past_tokens < told.past_tokens_capacity < told.memory_bytes
    async with tiny_engine() as engine:
        assert engine.snapshot().scheduler.proposer is None
