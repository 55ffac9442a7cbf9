"""Row F9 of the fault table: weights that are no numbers, or nothing but zeros."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from troupellm.tests.support.checkpoints.refusals import engine_of
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

WEIGHTS, HEAD, EMBEDDING = "model.safetensors", "lm_head.weight", "model.embed_tokens.weight"
HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    # path: what is asked there
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def fill(folder: Path, name: str, value: float) -> None:
    weights = load_file(folder / WEIGHTS)
    weights[name] = np.full_like(weights[name], value)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(("value", "status"), [(np.nan, 500), (np.inf, 500), (0.0, 200)])
async def test_F9_weights_that_are_no_numbers_cost_requests_and_not_the_server(folder, value, status):
    fill(folder, HEAD, value)
    async with engine_of(folder) as engine, running_server(engine) as served, served.client() as client:
        for path, body in ASKED.items():
            answer = await client.post(path, json={"model": "tiny"} | body)
            assert answer.status_code == status, (path, answer.text)
            assert status == 200 or answer.headers["x-should-retry"] == "false"
            streamed = await client.post(path, json={"model": "tiny", "stream": True} | body)
            assert ("NaN or infinite" in streamed.text) == (status == 500), (path, streamed.text)
            assert streamed.status_code in (200, status), path
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
async def test_F9_vectors_that_are_no_numbers_are_not_sent(folder, value):
    fill(folder, EMBEDDING, value)
    pair = {"text_1": "Hi", "text_2": "Ho"}
    asked = {"/v1/embeddings": {"input": "Hi"}, "/pooling": {"input": "Hi"}, "/v1/score": pair}
    async with engine_of(folder) as engine, running_server(engine) as served, served.client() as client:
        for path, body in asked.items():
            answer = await client.post(path, json={"model": "tiny"} | body)
            assert answer.status_code == 500, (path, answer.text)
            assert answer.headers["x-should-retry"] == "false"
            assert "NaN or infinite" in answer.text
        assert (await client.get("/health")).status_code == 200
