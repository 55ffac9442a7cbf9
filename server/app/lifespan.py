"""Engines that live as long as an application: for host frameworks, and for apps that own their engine."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.errors import TroupeError
from troupellm.server.base.errors import flatten

if TYPE_CHECKING:
    from troupellm.server.base.exchange import Receive, Send
    from troupellm.server.base.router import Route
    from troupellm.server.host.served_engine import ServedEngine
    from troupellm.server.host.server_state import ServerState


def lifespan(
    model: str | None = None, *, state: str = "llm", **settings: Any
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Engine]]]:
    """A lifespan function for Starlette, FastAPI and their kin.

    The open engine is found as `request.state.<state>` and, where the framework has it, `app.state.<state>`.
    """

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[dict[str, Engine]]:
        async with Engine(model, **settings) as engine:
            if hasattr(app, "state"):
                setattr(app.state, state, engine)
            yield {state: engine}

    return run


@asynccontextmanager
async def _engine(host: "ServerState", owned: Engine | None) -> AsyncIterator["ServedEngine"]:
    """The app's own engine, which it opens, or the one that it was lent."""
    if owned is None:
        assert host.engine is not None
        yield host.engine
        return
    async with owned as engine:
        yield engine


@asynccontextmanager
async def _batches(
    host: "ServerState", engine: "ServedEngine", routes: Sequence["Route"], owners: Mapping[str, str]
) -> AsyncIterator[None]:
    from troupellm.server.batches.runner import held_folder, running_batches

    with held_folder(host.config):
        async with running_batches(engine, host.config, routes, host, owners):
            yield


async def run_lifespan(
    host: "ServerState",
    owned: Engine | None,
    routes: Sequence["Route"],
    owners: Mapping[str, str],
    receive: "Receive",
    send: "Send",
) -> None:
    """Answer the server's lifespan messages; between startup and shutdown an owned engine is open."""
    await receive()
    host.loading = host.engine is None
    started = False
    try:
        async with _engine(host, owned) as engine, host.running(), _batches(host, engine, routes, owners):
            host.engine = engine
            started = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
            host.draining = True
    except (Exception, BaseExceptionGroup) as error:
        cause = flatten(error)
        host.failure = cause.message if isinstance(cause, TroupeError) else "the engine could not start"
        await send({"type": f"lifespan.{'shutdown' if started else 'startup'}.failed", "message": str(cause)})
        return
    await send({"type": "lifespan.shutdown.complete"})
