"""The load generator against the real server on a loopback socket."""

from urllib.parse import urlsplit

import pytest

from troupellm.load_tests.client import metrics
from troupellm.load_tests.client.client import Target
from troupellm.load_tests.client.driver import drive
from troupellm.load_tests.client.records import SampleRequest
from troupellm.tests.support.engines.fixtures import anyio_backend, checkpoint, tiny_engine
from troupellm.tests.support.servers.serving import running_server

__all__ = ["anyio_backend", "checkpoint", "tiny_engine"]
pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("chat", [False, True])
async def test_every_stream_is_whole(tiny_engine, chat):
    samples = [SampleRequest(prompt="tell" if chat else [5, 6, number], output_len=3 + number) for number in range(12)]
    async with tiny_engine() as engine, running_server(engine) as served:
        target = Target.make(
            urlsplit(served.url),
            "/v1/chat/completions" if chat else "/v1/completions",
            api_key=None,
            chat=chat,
            model=engine.model_names[0],
            body={"temperature": 0.0, "ignore_eos": True, "return_token_ids": True},
            timeout=30.0,
        )
        run = await drive(target, samples, [0.01 * number for number in range(12)], ignore_eos=True, time_limit=60.0)
    assert [record.error for record in run.records] == [""] * 12
    assert [record.output_tokens for record in run.records] == [sample.output_len for sample in samples]
    assert [sum(record.chunk_tokens) for record in run.records] == [sample.output_len for sample in samples]
    report = metrics.build_report(run.records, run.start, run.duration)
    assert (report["completed"], report["total_output_tokens"]) == (12, sum(range(3, 15)))
    assert report["mean_e2el_ms"] > report["mean_ttft_ms"] > 0


async def test_refusals_of_the_real_server_are_failures(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served:
        target = Target.make(
            urlsplit(served.url), "/v1/completions", api_key=None, chat=False, model="unknown", body={}, timeout=30.0
        )
        run = await drive(target, [SampleRequest(prompt=[5], output_len=2)], [0.0])
    assert run.records[0].error.startswith("HTTP 404: ")
