"""`--metrics PORT`: metrics and probes at a port of their own, which needs no key."""

from pathlib import Path

import anyio
import httpx
import pytest

from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.server.http.listener import bind
from troupellm.server.serve.http_side import LocalSide, MetricsPort
from troupellm.server.serve.run import serve
from troupellm.server.serve.shutdown import Shutdown
from troupellm.tests.support.servers.processes import MODES, free_port, ready_process

pytestmark = pytest.mark.anyio


@pytest.mark.slow
@pytest.mark.parametrize("flags", MODES)
async def test_metrics_at_a_port_of_their_own_need_no_key(checkpoint: Path, flags: tuple[str, ...]) -> None:
    port = free_port()
    given = ("--metrics", str(port), "--api-key", "secret", *flags)
    async with (
        ready_process(checkpoint, *given) as server,
        server.client() as client,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as beside,
    ):
        key = {"authorization": "Bearer secret"}
        body = {"model": "tiny", "prompt": "once", "max_tokens": 2}
        assert (await client.post("/v1/completions", json=body, headers=key)).status_code == 200
        assert (await client.get("/metrics", headers=key)).status_code == 404
        metrics = await beside.get("/metrics")
        assert metrics.status_code == 200
        assert 'route="/v1/completions",status="200"} 1.0' in metrics.text
        assert "troupellm_responses_stored " in metrics.text
        assert (await beside.get("/readyz")).status_code == 200
        assert (await beside.get("/v1/models", headers=key)).status_code == 404


async def test_its_probes_tell_of_loading_and_of_draining(tiny_engine) -> None:
    config = ServerConfig(port=0, metrics=str(free_port()))
    listener, _ = bind(config)
    side = LocalSide(config, listener)
    port = MetricsPort(config, side)
    shutdown = Shutdown(side, 1.0, lambda: None, port)
    with listener:
        async with (
            tiny_engine() as engine,
            anyio.create_task_group() as group,
            httpx.AsyncClient(base_url=port.url) as client,
        ):
            group.start_soon(port.run)
            port.report(LoadProgress(phase="weights", done=1, total=4))
            loading = await client.get("/readyz")
            port.open(engine)
            ready = await client.get("/readyz")
            shutdown.refuse()
            draining = await client.get("/readyz")
            await port.stop()
    shutdown.hard_exit.disarm()
    assert [answer.status_code for answer in (loading, ready, draining)] == [503, 200, 503]
    assert "weights 25%" in loading.text


@pytest.mark.parametrize("value", ["closed", "0", "-1", "123456", "70000", ""])
async def test_another_value_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        await serve(EngineConfig(), ServerConfig(port=0, metrics=value))
    assert caught.value.param == "metrics"


async def test_the_port_of_the_server_is_refused() -> None:
    port = free_port()
    with pytest.raises(ConfigError) as caught:
        await serve(EngineConfig(), ServerConfig(port=port, metrics=str(port)))
    assert caught.value.param == "metrics"
