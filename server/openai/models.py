"""GET /v1/models and /v1/models/{id}. Ids may hold slashes."""

import time
from pathlib import PurePath
from typing import Any

import msgspec

from troupellm.protocol.api.model_info import ModelCard, ModelList
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.messages.worker import WorkerReady
from troupellm.server.base.exchange import Exchange
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.host.server_state import ServerState, may_use


async def listing(host: ServerState, exchange: Exchange, _: None) -> None:
    engine = host.require()
    adapters = {info.name: info for info in await engine.list_adapters()}
    names = [name for name in (*engine.model_names, *adapters) if may_use(engine, exchange, name)]
    cards = [_card(host, name, adapters.get(name)) for name in names]
    first, last = (names[0], names[-1]) if names else (None, None)
    await exchange.respond(200, msgspec.json.encode(ModelList(data=cards, first_id=first, last_id=last)))


async def retrieve(host: ServerState, exchange: Exchange, _: None) -> None:
    name = await host.check_model(exchange, exchange.tail)
    adapter = await host.require().find_adapter(name) if exchange.adapter else None
    await exchange.respond(200, msgspec.json.encode(_card(host, name, adapter)))


def _card(host: ServerState, name: str, adapter: AdapterInfo | None) -> ModelCard:
    """The root of an adapter is the name of its folder; paths of this machine are not shown."""
    engine = host.require()
    context = engine.limits.max_model_len
    return ModelCard(
        id=name,
        created=host.created,
        root=engine.model_names[0] if adapter is None else PurePath(adapter.folder).name,
        parent=None if adapter is None else adapter.parent,
        max_model_len=context,
        tasks=tasks_of(engine.ready),
        modalities=["text", *(engine.ready.media.kinds if engine.ready.media else ())],
        display_name=name,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(host.created)),
        max_input_tokens=context - 1 if engine.ready.generates else context,
        max_tokens=context - 1 if engine.ready.generates else 0,
        capabilities=_capabilities(engine),
    )


def _capabilities(engine: ServedEngine) -> dict[str, Any]:
    """The capabilities of a model here, in the form of Anthropic's API."""
    generates = engine.ready.generates
    thinks = generates and engine.chat_format.thinks
    yes, no = {"supported": True}, {"supported": False}
    effort = {"supported": thinks}
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": {"supported": False},
        "effort": {"supported": thinks, **dict.fromkeys(("low", "medium", "high", "max"), effort)},
        "image_input": no if engine.ready.media is None else yes,
        "pdf_input": no,
        "server_tools": {"supported": False, "code_execution": no, "web_search": no},
        "structured_outputs": yes if generates else no,
        "thinking": {
            "supported": thinks,
            "types": {
                "adaptive": {"supported": thinks},
                "between_tools": {"supported": thinks},
                "disabled": yes,
                "enabled": {"supported": thinks},
            },
        },
    }


def tasks_of(ready: WorkerReady) -> list[str]:
    """The tasks of the model."""
    return ["generate"] * ready.generates + list(ready.pooling.tasks if ready.pooling else ())
