"""Routes of KV sessions: they are refused where leases are off, and a scheduler that does not answer is a 503."""

from types import SimpleNamespace
from typing import Any

import pytest

from troupellm.actors.engine.sleep import PauseAndSleep
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.config.kv_hints import DropSession, LeaseConfig
from troupellm.protocol.errors import EngineStopped, InvalidRequest
from troupellm.server.base.errors import answer
from troupellm.server.host.server_state import ServerState
from troupellm.server.openai.kv_sessions import drop, keep_session, prefetch

pytestmark = pytest.mark.anyio

EXCHANGE: Any = SimpleNamespace(key="one", path_values={"session_id": "s"})


def host_with(fraction: float, asked: list[str]) -> ServerState:
    """A host that writes down which actions are asked of its engine."""
    config = EngineConfig(leases=LeaseConfig(kv_lease_fraction=fraction))
    engine: Any = SimpleNamespace(state="ready", config=config)
    host = ServerState(ServerConfig(), engine)

    async def administer(action: str, _: bytes) -> bytes:
        asked.append(action)
        return b"{}"

    host.administer = administer
    return host


@pytest.mark.parametrize("route", [prefetch, drop])
async def test_without_leases_the_routes_name_the_flag(route: Any) -> None:
    asked: list[str] = []
    with pytest.raises(InvalidRequest, match="--kv-lease-fraction") as caught:
        await route(host_with(0.0, asked), EXCHANGE, None)
    assert (answer(caught.value).status, caught.value.code, asked) == (400, "not_configured", [])


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, ["kv_keep"]), (0.0, [])])
async def test_a_session_is_kept_only_where_leases_are_on(fraction: float, expected: list[str]) -> None:
    asked: list[str] = []
    await keep_session(host_with(fraction, asked), EXCHANGE, "s")
    assert asked == expected


async def test_a_scheduler_that_does_not_answer_in_time_is_a_503() -> None:
    unread: Any = Mailbox("scheduler", 1)
    absent: Any = None
    rest = PauseAndSleep(unread, absent, absent, absent, lambda: EngineStopped("the engine has ended"))
    with pytest.raises(EngineStopped, match="did not answer within 0 seconds") as caught:
        await rest.ask(lambda done: DropSession("", "s", done), 0.0)
    assert (answer(caught.value).status, caught.value.code) == (503, "server_is_overloaded")
