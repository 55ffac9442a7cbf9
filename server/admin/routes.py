"""The admin routes. They are carried out in the engine's process, wherever the request came in."""

from functools import partial
from typing import Any, get_args

import anyio
import msgspec

from troupellm.protocol.api import admin
from troupellm.protocol.api.chat import ErrorBody
from troupellm.protocol.messages.kv_events import KVEvent, KVEventsRead
from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.server.admin.kv_events import send_kv_events
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.router import Route
from troupellm.server.host.admin_actions import ACTIONS
from troupellm.server.host.server_state import ServerState


def routes(host: ServerState, prefix: str) -> list[Route]:
    """All of them; they lie beside the API's prefix, as vLLM's do."""

    def route(method: str, path: str, action: str, response: Any, summary: str, **more: Any) -> Route:
        arguments = ACTIONS[action].arguments
        more["query"] = admin.NoArguments if "body" in more else arguments
        return Route(
            method=method,
            path=path,
            handler=partial(act, host, action),
            scope="admin",
            response=response,
            summary=summary,
            problems=(409,),
            **more,
        )

    state, slept = admin.RestState, admin.SleepAnswer
    done, level = admin.DoneAnswer, admin.LogLevelBody
    ended = "End requests. Batches go on, and ask again for lines that were ended: cancel a batch to end it."
    return [
        route("POST", "/abort_requests", "abort", admin.AbortAnswer, ended, body=admin.AbortBody),
        route("POST", "/pause", "pause", state, "Compute nothing until resumed; what comes waits."),
        route("POST", "/resume", "resume", state, "Compute again."),
        route("GET", "/is_paused", "is_paused", admin.PausedAnswer, "Whether the engine is paused."),
        route("POST", "/reset_prefix_cache", "reset_prefix_cache", done, "Forget the prefix cache."),
        route("POST", "/sleep", "sleep", slept, "Compute nothing and give memory back; what comes is refused."),
        route("POST", "/wake_up", "wake_up", slept, "Take the memory back and compute again."),
        route("GET", "/is_sleeping", "is_sleeping", admin.SleepingAnswer, "Whether the engine sleeps."),
        route("POST", "/start_profile", "start_profile", done, "Record what the next steps do."),
        route("POST", "/stop_profile", "stop_profile", admin.ProfileAnswer, "Write what was recorded."),
        route("GET", "/log_level", "log_level", level, "Least severe lines to log."),
        route("POST", "/log_level", "set_log_level", level, "Change it.", body=level),
        route("POST", "/restart_replicas", "restart_replicas", done, "Replace the replicas one after the other."),
        route("GET", "/server_info", "server_info", admin.ServerInfo, "Versions, settings and limits; no secrets."),
        Route(
            method="GET",
            path="/kv_events",
            handler=partial(send_kv_events, host),
            scope="admin",
            query=admin.KVEventsQuery,
            response=KVEventsRead,
            streams=True,
            events=(*get_args(KVEvent), ErrorBody),
            own_end=True,
            problems=(409,),
            summary="What becomes of KV blocks, as server-sent events.",
        ),
        route("GET", "/debug/snapshot", "snapshot", EngineSnapshot, "The state of everything, in plain numbers."),
    ]


async def act(host: ServerState, action: str, exchange: Exchange, body: msgspec.Struct | None) -> None:
    """Carry it out; a client that leaves meanwhile takes back what is not done yet."""
    host.require()
    arguments = exchange.query if body is None else body
    if body is not None or exchange.method == "GET":  # who watches already, or is done at once
        await exchange.respond(200, await host.administer(action, msgspec.json.encode(arguments)))
        return
    answers: list[bytes | Exception] = []
    async with anyio.create_task_group() as group:
        group.start_soon(exchange.watch, group.cancel_scope)
        try:
            answers.append(await host.administer(action, msgspec.json.encode(arguments)))
        except Exception as error:  # raised below, where it stands alone
            answers.append(error)
        group.cancel_scope.cancel()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        await exchange.respond(200, answer)
