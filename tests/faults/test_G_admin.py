"""Row G8 of the fault table: admin verbs are off by default, and behind a key of their own."""

from pathlib import Path
from typing import Any

import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.app.app import App
from troupellm.server.host.admin_actions import ACTIONS
from troupellm.server.host.server_state import ServerState
from troupellm.server.http.listener import bind_unix
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.serving import server_config

pytestmark = pytest.mark.anyio

CONFIGS = {
    "off": server_config(),
    "off, with API keys": server_config(api_key=("sk-user",)),
    "on": server_config(admin_api_key=("root-key",)),
    "on, with API keys": server_config(api_key=("sk-user",), admin_api_key=("root-key",)),
}
WRONG = (None, "sk-user", "root-ke", "root-key2")


def admin_routes() -> list[tuple[str, str]]:
    app = App(ServerState(ServerConfig()), scopes=("open", "api", "admin"))
    return [(route.method, route.path) for route in app.routes if route.scope == "admin"]


PATHS = {
    "abort": "/abort_requests", "set_log_level": "/log_level", "snapshot": "/debug/snapshot",
    "load_adapter": "/v1/load_lora_adapter", "unload_adapter": "/v1/unload_lora_adapter",
}  # fmt: skip
"""Of the actions whose path is not their name."""


OF_OTHER_ROUTES = {"kv_keep", "kv_prefetch", "kv_drop", "find_adapter", "list_adapters", "live_view"}
"""Actions that routes of the API and the page ask for, under the keys of those."""


def test_every_other_action_has_one_route() -> None:
    named = sorted(PATHS.get(name, f"/{name}") for name in ACTIONS.keys() - OF_OTHER_ROUTES)
    assert sorted(path for _, path in admin_routes()) == named


@pytest.mark.parametrize(
    "name", ["on, with API keys", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CONFIGS)[:3])]
)
async def test_G8_admin_verbs_need_a_key_of_their_own(tiny_engine: Any, name: str) -> None:
    """Every route, under every key that is not the admin's: nothing happens, and no client notices."""
    config = CONFIGS[name]
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        client = attacked.new_client()
        async with client:
            client.headers.pop("authorization", None)
            for method, path in admin_routes():
                for key in WRONG:
                    headers = {} if key is None else {"authorization": f"Bearer {key}"}
                    body = {"json": {"all": True, "level": "debug"}} if method == "POST" else {}
                    response = await client.request(method, path, headers=headers, **body)
                    locked = config.admin_api_key or (config.api_key and key != "sk-user")
                    assert response.status_code == (401 if locked else 404), (method, path, key, response.text)
                    assert "root" not in response.text
        assert not engine.is_paused
        assert not engine.is_sleeping


async def test_G8_the_admin_key_opens_nothing_else(tiny_engine: Any) -> None:
    config = CONFIGS["on, with API keys"]
    async with tiny_engine() as engine, under_attack(engine, config) as attacked:
        headers = {"authorization": "Bearer root-key"}
        assert (await attacked.client.get("/v1/models", headers=headers)).status_code == 401
        assert (await attacked.client.get("/server_info", headers=headers)).status_code == 200


def test_G8_the_socket_is_its_owners(tmp_path: Path) -> None:
    with bind_unix(str(tmp_path / "admin.sock"), ServerConfig()):
        assert (tmp_path / "admin.sock").stat().st_mode & 0o777 == 0o600
