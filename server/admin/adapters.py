"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: bodies and answers are vLLM's, the scope is the admin's."""

from functools import partial

import msgspec

from troupellm.protocol.api import admin
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.router import Route
from troupellm.server.host.server_state import ServerState

_TEXT = b"text/plain; charset=utf-8"


def routes(host: ServerState, prefix: str) -> list[Route]:
    return [
        Route(
            method="POST",
            path=f"{prefix}/load_lora_adapter",
            handler=partial(load, host),
            body=admin.LoadAdapterBody,
            scope="admin",
            answers="text/plain",
            problems=(404,),
            summary="Serve a LoRA adapter under a name.",
        ),
        Route(
            method="POST",
            path=f"{prefix}/unload_lora_adapter",
            handler=partial(unload, host),
            body=admin.UnloadAdapterBody,
            scope="admin",
            answers="text/plain",
            problems=(404,),
            summary="Serve a LoRA adapter no more; requests that have begun go on.",
        ),
    ]


async def load(host: ServerState, exchange: Exchange, body: admin.LoadAdapterBody) -> None:
    """Answers when requests may name the adapter, in every API process."""
    host.require()
    await host.administer("load_adapter", msgspec.json.encode(body))
    await _respond(exchange, body.lora_name, "added")


async def unload(host: ServerState, exchange: Exchange, body: admin.UnloadAdapterBody) -> None:
    host.require()
    await host.administer("unload_adapter", msgspec.json.encode(body))
    await _respond(exchange, body.lora_name, "removed")


async def _respond(exchange: Exchange, name: str, done: str) -> None:
    text = f"Success: LoRA adapter '{name}' {done} successfully."
    await exchange.respond(200, text.encode(), content_type=_TEXT)
