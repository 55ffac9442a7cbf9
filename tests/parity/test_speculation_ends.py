"""Rows that end inside their drafts, through the whole engine: the answer is the one without drafts, a request that
cannot go on ends alone, and no worker is lost."""

from typing import Any

import anyio
import pytest
from engines import anyio_backend, checkpoint, tiny_engine
from meddler import WorkerHosts

from troupellm.protocol.errors import RequestFailed
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams

__all__ = ["anyio_backend", "checkpoint", "tiny_engine"]
pytestmark = pytest.mark.anyio

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12},
}
A, B = 32, 33
A_LOT = {A: 60.0}
GUIDED: dict[str, dict[str, Any]] = {
    "a run of four": {"structured_outputs": StructuredOutputsParams(regex="[AB]{4}"), "logit_bias": A_LOT},
    "a run of six": {
        "structured_outputs": StructuredOutputsParams(regex="[AB]{6}"), "logit_bias": A_LOT, "logprobs": 2,
    },
    "a choice": {"structured_outputs": StructuredOutputsParams(choice=["ABABAB", "BAAAAB"]), "logprobs": 1},
    "JSON": {
        "structured_outputs": StructuredOutputsParams(
            json={
                "type": "object", "properties": {"A": {"enum": ["AAAA", "AABB"]}}, "required": ["A"],
                "additionalProperties": False,
            }
        ), "logprobs": 1,
    },
}  # fmt: skip
"""Those with log-probabilities have no forced tokens, so everything is drafted."""
DEAD_END = {"allowed_token_ids": [A, B], "logit_bias": A_LOT, "bad_words": ["AAAA", "AAAB"], "ignore_eos": True}
"""Three times A, and then nothing is left to choose from."""


async def answer(engine: Any, fields: dict[str, Any]) -> tuple[list[int], list[float], str | None]:
    """Tokens, log-probabilities, and why it failed if it did."""
    tokens: list[int] = []
    logprobs: list[float] = []
    options = {"max_tokens": 40, "temperature": 0.0, **fields}
    try:
        async with engine.stream([30, *[A] * 12], **options) as stream:
            async for delta in stream:
                tokens += delta.token_ids
                logprobs += [entry.logprob for entry in delta.logprobs or ()]
    except RequestFailed as error:
        return tokens, logprobs, str(error)
    return tokens, logprobs, None


@pytest.mark.parametrize("method", METHODS)
async def test_ends_inside_drafts_are_those_without(tiny_engine: Any, method: str) -> None:
    asks = GUIDED | {"a dead end": DEAD_END, "a neighbour": {"ignore_eos": True, "logit_bias": A_LOT}}
    async with tiny_engine() as engine:
        right = {name: await answer(engine, fields) for name, fields in asks.items()}
    assert "no token" in str(right["a dead end"][2])
    ended: set[int] = set()
    hosts = WorkerHosts()

    def watch(result: Any) -> Any:
        for row, count, drafted in zip(result.rows, result.token_counts, result.drafted, strict=False):
            if row in result.finished and 0 < count <= drafted:
                ended.add(row)
        return result

    async with tiny_engine(worker=hosts, speculative_config=METHODS[method] | {"adaptive": False}) as engine:
        hosts.worker.on_result = watch
        for _ in range(3):  # from the second time on the whole answer may be drafted
            for name, fields in asks.items():
                found: dict[str, Any] = {}

                async def ask(name: str, fields: dict[str, Any], found: dict[str, Any] = found) -> None:
                    found[name] = await answer(engine, fields)

                with anyio.fail_after(60):
                    async with anyio.create_task_group() as group:
                        group.start_soon(ask, name, fields)
                        group.start_soon(ask, "a neighbour", asks["a neighbour"])
                for asked, (tokens, logprobs, error) in found.items():
                    assert tokens == right[asked][0], asked
                    assert logprobs == pytest.approx(right[asked][1], abs=1e-4), asked
                    assert error == right[asked][2], asked
        snapshot = engine.snapshot().scheduler
    assert snapshot.replays == 0
    assert snapshot.accepted_draft_tokens > 0
    assert len(ended) >= 3, "guides are complete behind drafts"
