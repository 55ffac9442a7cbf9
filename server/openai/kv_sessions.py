"""/v1/kv/sessions: what a client tells of its session's KV cache between requests."""

from contextlib import suppress
from functools import partial

import anyio
import msgspec

from troupellm.protocol.api import admin
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import InvalidRequest, TroupeError
from troupellm.server.base.errors import HttpError
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.router import Route
from troupellm.server.host.server_state import ServerState

_KEEP_SECONDS = 1.0
"""That the engine's process may take to hear of it."""


def routes(host: ServerState, prefix: str) -> list[Route]:
    one = f"{prefix}/kv/sessions/{{session_id}}"
    return [
        Route(
            method="POST",
            path=f"{one}/prefetch",
            handler=partial(prefetch, host),
            summary="Bring the KV blocks of a session's last turns to the device",
            response=admin.SessionPrefetch,
        ),
        Route(
            method="DELETE",
            path=one,
            handler=partial(drop, host),
            summary="End a session: the KV blocks that only it has are evicted first",
            response=admin.SessionDropped,
        ),
    ]


async def prefetch(host: ServerState, exchange: Exchange, _: None) -> None:
    """
    Raises:
        HttpError: 404, the key has no such session.
        InvalidRequest: leases are off.
    """
    session, asked = _asked(host, exchange)
    answer = msgspec.json.decode(await host.administer("kv_prefetch", asked), type=admin.KVPrefetchAnswer)
    if answer.report is None:
        raise _unknown(session)
    report = answer.report
    await exchange.respond(
        200,
        msgspec.json.encode(
            admin.SessionPrefetch(
                id=session,
                present_blocks=report.present,
                loading_blocks=report.loading,
                missing_blocks=report.missing,
                no_room_blocks=report.no_room,
            )
        ),
    )


async def drop(host: ServerState, exchange: Exchange, _: None) -> None:
    """
    Raises:
        HttpError: 404, the key has no such session.
        InvalidRequest: leases are off.
    """
    session, asked = _asked(host, exchange)
    answer = msgspec.json.decode(await host.administer("kv_drop", asked), type=admin.KVDropAnswer)
    if answer.blocks is None:
        raise _unknown(session)
    await exchange.respond(200, msgspec.json.encode(admin.SessionDropped(id=session, evicted_first=answer.blocks)))


async def keep_session(host: ServerState, exchange: Exchange, session: str) -> None:
    """The session's newest turn ended in tool calls. The client may have left: its results come with a new request."""
    if host.engine is None or not _leases(host.engine.config):
        return
    body = admin.KVSessionBody(tenant=exchange.key, session=session)
    with anyio.move_on_after(_KEEP_SECONDS, shield=True), suppress(TroupeError):  # a hint is of use or it is not
        await host.administer("kv_keep", msgspec.json.encode(body))


def _asked(host: ServerState, exchange: Exchange) -> tuple[str, bytes]:
    """
    Raises:
        InvalidRequest: leases are off, so there are no sessions.
    """
    if not _leases(host.require().config):
        message = "KV sessions are off: start the server with --kv-lease-fraction above 0, and with prefix caching"
        raise InvalidRequest(message, code="not_configured")
    session = exchange.path_values["session_id"]
    return session, msgspec.json.encode(admin.KVSessionBody(tenant=exchange.key, session=session))


def _leases(config: EngineConfig) -> bool:
    return config.cache.enable_prefix_caching and config.leases.kv_lease_fraction > 0.0


def _unknown(session: str) -> HttpError:
    message = f"there is no session {session[:64]!r}: it is known once a request that names it has ended"
    return HttpError(404, message, code="session_not_found")
