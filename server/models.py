"""GET /v1/models and /v1/models/{id}. Ids may hold slashes."""

import msgspec

from troupellm.protocol.openai import ModelCard, ModelList
from troupellm.protocol.worker import WorkerReady
from troupellm.server.exchange import Exchange
from troupellm.server.host import EngineHost


async def listing(host: EngineHost, exchange: Exchange, _: None) -> None:
    names = host.require().model_names
    await exchange.respond(200, msgspec.json.encode(ModelList(data=[_card(host, name) for name in names])))


async def retrieve(host: EngineHost, exchange: Exchange, _: None) -> None:
    await exchange.respond(200, msgspec.json.encode(_card(host, host.check_model(exchange.tail))))


def _card(host: EngineHost, name: str) -> ModelCard:
    engine = host.require()
    return ModelCard(
        id=name,
        created=host.created,
        root=engine.model_names[0],
        max_model_len=engine.limits.max_model_len,
        tasks=tasks_of(engine.ready),
    )


def tasks_of(ready: WorkerReady) -> list[str]:
    """What the model does."""
    return ["generate"] * ready.generates + list(ready.pooling.tasks if ready.pooling else ())
