"""Engines that live as long as an application: for host frameworks, and for apps that own their engine."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from troupellm.actors.engine import Engine
from troupellm.protocol.errors import TroupeError
from troupellm.server.errors import flatten

if TYPE_CHECKING:
    from troupellm.server.exchange import Receive, Send
    from troupellm.server.host import EngineHost


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


async def run_lifespan(host: "EngineHost", owned: Engine | None, receive: "Receive", send: "Send") -> None:
    """Answer the server's lifespan messages; between startup and shutdown an owned engine is open."""
    await receive()
    if owned is None:
        async with host.running():
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    host.loading = True
    started = False
    try:
        async with owned as engine, host.running():
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
