"""Row C of the fault table: memory of refused prompts goes back at once, without a garbage collection."""

import gc
from collections.abc import Iterator

import pytest

from troupellm.tests.support.servers.serving import running_server, server_config

pytestmark = pytest.mark.anyio

TOKENS = 600_021
"""Of the refused prompt: more than the context, and no other list has as many."""
BODIES = {
    "/v1/completions": {"prompt": [5] * TOKENS},
    "/v1/embeddings": {"input": [5] * TOKENS},
    "/detokenize": {"tokens": [5] * (TOKENS - 1) + [-1]},
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_C3_a_refused_prompt_is_free_with_its_answer(tiny_engine, no_collection, route, stream):
    async with tiny_engine() as engine, running_server(engine, server_config()) as served, served.client() as client:
        body = {"model": "tiny", **BODIES[route], "stream": stream}
        for _ in range(3):
            response = await client.post(route, json=body)
            assert response.status_code == 400, response.text[:300]
        await client.post("/v1/completions", json={"model": "tiny", "prompt": [5], "max_tokens": 1})
        del body
        kept = [found for found in gc.get_objects() if type(found) is list and len(found) == TOKENS]
        assert not kept  # those of this file were frozen when it was collected
