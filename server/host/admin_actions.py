"""Actions of the admin routes, in the engine's process. An API server process sends name and arguments here."""

import logging
import os
import platform
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.api import admin
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import InvalidRequest, RequestFailed, TroupeError
from troupellm.protocol.messages.adapters import AdapterInfo, AdaptersServed
from troupellm.protocol.messages.kv_events import KVEventsRead
from troupellm.protocol.messages.live_view import LiveView, without_names
from troupellm.protocol.messages.sleep import SleepReport
from troupellm.protocol.messages.snapshot import EngineSnapshot

logger = logging.getLogger("troupellm.server")

_SECRETS = ("api_key", "admin_api_key", "hf_token", "kv_transfer_config")
"""A connector may be given a password."""
_PACKAGES = ("torch", "anyio", "hypercorn", "msgspec", "safetensors", "tokenizers", "uvloop", "transformers", "triton")


class AdminActions:
    """Executes actions on an engine of this process."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Callable[[], Engine],
        set_log_level: Callable[[admin.LogLevel], None] | None = None,
    ) -> None:
        """
        Args:
            engine: the engine; raises where there is none yet.
            set_log_level: for every process of the server; this one's alone if not given.
        """
        self.config = config
        self._engine = engine
        self.set_log_level = set_log_level or apply_log_level

    @property
    def engine(self) -> Engine:
        return self._engine()

    async def act(self, name: str, arguments: bytes) -> bytes:
        """Execute an action. Arguments and answer are JSON.

        Raises:
            TroupeError: why it was not done.
        """
        action = ACTIONS[name]
        try:
            answer = await action.call(self, msgspec.json.decode(arguments, type=action.arguments))
        except TroupeError:
            raise
        except Exception as error:
            logger.error("the admin action %s failed", name, exc_info=error)
            raise RequestFailed("internal error", code="internal_error") from error
        return msgspec.json.encode(answer)


class Action(msgspec.Struct, frozen=True):
    arguments: Any
    call: Callable[[AdminActions, Any], Awaitable[msgspec.Struct]]


def apply_log_level(level: admin.LogLevel) -> None:
    logging.getLogger("troupellm").setLevel(level.upper())


async def abort(actions: AdminActions, body: admin.AbortBody) -> admin.AbortAnswer:
    if body.all == bool(body.request_ids):
        raise InvalidRequest("give either request_ids or all", param="request_ids")
    if body.all:
        return admin.AbortAnswer(await actions.engine.abort_all())
    return admin.AbortAnswer(sum([await actions.engine.abort(request_id) for request_id in body.request_ids]))


async def pause(actions: AdminActions, query: admin.PauseQuery) -> admin.RestState:
    mode = "wait" if query.wait_for_inflight_requests else query.mode
    await actions.engine.pause(mode, clear_cache=query.clear_cache)
    return _rest_state(actions)


async def resume(actions: AdminActions, _: admin.NoArguments) -> admin.RestState:
    await actions.engine.resume()
    return _rest_state(actions)


async def is_paused(actions: AdminActions, _: admin.NoArguments) -> admin.PausedAnswer:
    return admin.PausedAnswer(actions.engine.is_paused)


async def reset_prefix_cache(actions: AdminActions, query: admin.ResetQuery) -> admin.DoneAnswer:
    if query.reset_running_requests:
        name = "reset_running_requests"
        raise InvalidRequest(f"{name}: it is not supported", param=name, code="unsupported_parameter")
    return admin.DoneAnswer(await actions.engine.reset_prefix_cache(external=query.reset_external))


async def sleep(actions: AdminActions, query: admin.SleepQuery) -> admin.SleepAnswer:
    report = await actions.engine.sleep(query.level, query.mode)
    return _slept(actions, report)


async def wake_up(actions: AdminActions, query: admin.WakeQuery) -> admin.SleepAnswer:
    return _slept(actions, await actions.engine.wake(query.tags or None))


async def is_sleeping(actions: AdminActions, _: admin.NoArguments) -> admin.SleepingAnswer:
    return admin.SleepingAnswer(actions.engine.is_sleeping)


async def kv_events(actions: AdminActions, query: admin.KVEventsQuery) -> KVEventsRead:
    rank = actions.engine.config.parallel.data_parallel_rank
    if query.replica not in (None, rank):
        raise InvalidRequest(f"replica must be {rank}, got {query.replica}: there is one engine", param="replica")
    return await actions.engine.read_kv_events(
        query.after, seconds=query.seconds, snapshot=query.snapshot, begun=query.snapshot_begun
    )


async def start_profile(actions: AdminActions, query: admin.ProfileQuery) -> admin.DoneAnswer:
    folder = actions.config.profile_dir
    if folder is None:
        raise InvalidRequest("profiles need a folder: start the server with --profile-dir", code="not_configured")
    name = None if query.prefix is None else f"{query.prefix}-{secrets.token_hex(6)}"
    await actions.engine.start_profile(folder, name=name, max_steps=query.max_iterations)
    return admin.DoneAnswer()


async def stop_profile(actions: AdminActions, _: admin.NoArguments) -> admin.ProfileAnswer:
    report = await actions.engine.stop_profile()
    return admin.ProfileAnswer(os.path.basename(report.file), report.steps)


async def set_log_level(actions: AdminActions, body: admin.LogLevelBody) -> admin.LogLevelBody:
    actions.set_log_level(body.level)
    logger.warning("the log level is %s now", body.level)
    return body


async def log_level(actions: AdminActions, _: admin.NoArguments) -> admin.LogLevelBody:
    name = logging.getLevelName(logging.getLogger("troupellm").getEffectiveLevel()).lower()
    return msgspec.convert({"level": {"critical": "error"}.get(name, name)}, admin.LogLevelBody)


async def server_info(actions: AdminActions, _: admin.NoArguments) -> admin.ServerInfo:
    import troupellm

    engine = actions.engine
    snapshot = engine.snapshot()
    return admin.ServerInfo(
        version=troupellm.__version__,
        python=sys.version.split()[0],
        platform=platform.platform(),
        pid=os.getpid(),
        models=engine.model_names,
        state=engine.state,
        uptime_seconds=snapshot.uptime_seconds,
        limits=_plain(engine.limits),
        engine_config=_plain(engine.config),
        server_config=_plain(actions.config),
        worker=_plain(engine.ready),
        packages=_versions(),
    )


async def restart_replicas(actions: AdminActions, _: admin.NoArguments) -> admin.DoneAnswer:
    raise InvalidRequest("restart_replicas: there is one engine; a server has replicas with -dp N", code="no_replicas")


async def snapshot(actions: AdminActions, _: admin.NoArguments) -> EngineSnapshot:
    return actions.engine.snapshot()


async def live_view(actions: AdminActions, query: admin.LiveViewQuery) -> LiveView:
    view = actions.engine.live_view()
    return view if query.names else without_names(view)


async def kv_keep(actions: AdminActions, body: admin.KVSessionBody) -> admin.DoneAnswer:
    actions.engine.keep_session(body.session, tenant=body.tenant)
    return admin.DoneAnswer()


async def kv_prefetch(actions: AdminActions, body: admin.KVSessionBody) -> admin.KVPrefetchAnswer:
    return admin.KVPrefetchAnswer(await actions.engine.prefetch_session(body.session, tenant=body.tenant))


async def kv_drop(actions: AdminActions, body: admin.KVSessionBody) -> admin.KVDropAnswer:
    return admin.KVDropAnswer(await actions.engine.drop_session(body.session, tenant=body.tenant))


async def load_adapter(actions: AdminActions, body: admin.LoadAdapterBody) -> AdapterInfo:
    info = await actions.engine.load_adapter(
        body.lora_name,
        body.lora_path,
        replace=body.load_inplace,
        base_model_name=body.base_model_name,
        below_lora_dir=True,
    )
    logger.warning("the adapter %s is served", body.lora_name)
    return info


async def unload_adapter(actions: AdminActions, body: admin.UnloadAdapterBody) -> AdapterInfo:
    info = await actions.engine.unload_adapter(body.lora_name)
    logger.warning("the adapter %s is not served any more", info.name)
    return info


async def find_adapter(actions: AdminActions, body: admin.AdapterName) -> AdapterInfo:
    return await actions.engine.find_adapter(body.lora_name)


async def list_adapters(actions: AdminActions, _: admin.NoArguments) -> AdaptersServed:
    return AdaptersServed(await actions.engine.list_adapters())


ACTIONS: Mapping[str, Action] = {
    "abort": Action(admin.AbortBody, abort),
    "pause": Action(admin.PauseQuery, pause),
    "resume": Action(admin.NoArguments, resume),
    "is_paused": Action(admin.NoArguments, is_paused),
    "reset_prefix_cache": Action(admin.ResetQuery, reset_prefix_cache),
    "sleep": Action(admin.SleepQuery, sleep),
    "wake_up": Action(admin.WakeQuery, wake_up),
    "is_sleeping": Action(admin.NoArguments, is_sleeping),
    "kv_events": Action(admin.KVEventsQuery, kv_events),
    "start_profile": Action(admin.ProfileQuery, start_profile),
    "stop_profile": Action(admin.NoArguments, stop_profile),
    "set_log_level": Action(admin.LogLevelBody, set_log_level),
    "log_level": Action(admin.NoArguments, log_level),
    "server_info": Action(admin.NoArguments, server_info),
    "restart_replicas": Action(admin.NoArguments, restart_replicas),
    "snapshot": Action(admin.NoArguments, snapshot),
    "live_view": Action(admin.LiveViewQuery, live_view),
    "load_adapter": Action(admin.LoadAdapterBody, load_adapter),
    "unload_adapter": Action(admin.UnloadAdapterBody, unload_adapter),
    "find_adapter": Action(admin.AdapterName, find_adapter),
    "list_adapters": Action(admin.NoArguments, list_adapters),
    "kv_keep": Action(admin.KVSessionBody, kv_keep),
    "kv_prefetch": Action(admin.KVSessionBody, kv_prefetch),
    "kv_drop": Action(admin.KVSessionBody, kv_drop),
}


def _rest_state(actions: AdminActions) -> admin.RestState:
    snapshot = actions.engine.snapshot()
    return admin.RestState(
        is_paused=snapshot.paused, is_sleeping=snapshot.sleep_level is not None, sleep_level=snapshot.sleep_level
    )


def _slept(actions: AdminActions, report: SleepReport) -> admin.SleepAnswer:
    state = _rest_state(actions)
    return admin.SleepAnswer(
        is_paused=state.is_paused,
        is_sleeping=state.is_sleeping,
        sleep_level=state.sleep_level,
        rss_before=report.rss_before,
        rss_after=report.rss_after,
        freed_bytes=report.freed,
        seconds=round(report.seconds, 6),
    )


def _plain(given: msgspec.Struct) -> dict[str, Any]:
    """As plain values, without secrets."""
    plain: dict[str, Any] = msgspec.to_builtins(given)
    return _without_secrets(plain)


def _without_secrets(plain: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_secrets(value) if isinstance(value, dict) else value
        for name, value in plain.items()
        if name not in _SECRETS
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
