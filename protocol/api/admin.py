"""The admin routes: what they are asked, and what they answer. Names and meanings are vLLM's where it has them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.config.kv_hints import PrefetchReport
from troupellm.protocol.messages.sleep import PauseMode, WakeTag

MAX_ABORTS = 1024
LogLevel = Literal["debug", "info", "warning", "error"]


class _Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query string. Unknown names are refused: with a misspelt one the default would abort all requests."""


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests to end: some, or all. A batch asks again for its lines that were ended: cancel it to end it."""

    request_ids: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=MAX_ABORTS)] = ()
    """As answers name them (`id`), or as clients have chosen them."""
    all: bool = False


class AbortAnswer(msgspec.Struct, frozen=True):
    aborted: int
    """Requests that were open and are not any more."""


class PauseQuery(_Query, frozen=True, kw_only=True):
    mode: PauseMode = "abort"
    """The fate of open requests: abort ends them, wait lets them finish, keep freezes them."""
    clear_cache: bool = True
    """Forget the prefix cache."""
    wait_for_inflight_requests: bool | None = None
    """An older name: true is mode wait."""


class ResetQuery(_Query, frozen=True, kw_only=True):
    reset_running_requests: bool = False
    """Requests that run go on with what they have computed: true is refused."""
    reset_external: bool = False
    """Also what other engines share through connectors."""


class SleepQuery(_Query, frozen=True, kw_only=True):
    level: Annotated[int, Meta(ge=0, le=2)] = 1
    """0 pauses, 1 gives the KV cache back, 2 the weights too."""
    mode: PauseMode = "abort"
    """The fate of open requests: abort ends them, wait lets them finish, keep freezes them."""


class WakeQuery(_Query, frozen=True, kw_only=True):
    tags: tuple[WakeTag, ...] = ()
    """Only these parts; all without any."""


class ProfileQuery(_Query, frozen=True, kw_only=True):
    max_iterations: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Recording ends by itself after so many steps."""
    prefix: Annotated[str, Meta(pattern=r"^(?!.*\n)[A-Za-z0-9_-]{1,64}$")] | None = None
    """Beginning of the file's name."""


class NoArguments(_Query, frozen=True):
    """The route takes none."""


class LiveViewQuery(_Query, frozen=True, kw_only=True):
    names: bool = False
    """Show the names of API keys."""


class KVEventsQuery(_Query, frozen=True, kw_only=True):
    after: Annotated[int, Meta(ge=0)] | None = None
    """Number of the last event that is known already, 0 for all that are kept; without it: from now on."""
    snapshot: bool = False
    """Begin with what can be found now, and do so again where events were missed."""
    snapshot_begun: Annotated[int, Meta(ge=0)] | None = None
    """Go on with a snapshot, behind `after`: what the answer before said under `snapshot`."""
    seconds: Annotated[float, Meta(ge=0.0, le=60.0)] = 0.0
    """How long to wait for an event; a stream waits as long as it takes."""
    replica: Annotated[int, Meta(ge=0)] | None = None
    """Whose events, where a server has replicas."""
    stream: bool = True
    """Server-sent events, whose ids are the events' numbers; false: one answer with what there is."""


class RestState(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine rests."""

    is_paused: bool
    is_sleeping: bool
    sleep_level: int | None
    """None is awake."""


class SleepAnswer(RestState, frozen=True, kw_only=True):
    rss_before: int
    """Bytes of memory that the worker's process held before, as the system counts them; 0 where nothing was done."""
    rss_after: int
    freed_bytes: int
    """Negative after a waking."""
    seconds: float


class SleepingAnswer(msgspec.Struct, frozen=True):
    is_sleeping: bool


class PausedAnswer(msgspec.Struct, frozen=True):
    is_paused: bool


class DoneAnswer(msgspec.Struct, frozen=True):
    success: bool = True


class ProfileAnswer(msgspec.Struct, frozen=True):
    file: str
    """In the folder of `--profile-dir`."""
    steps: int


class LogLevelBody(msgspec.Struct, frozen=True):
    level: LogLevel


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description of the server: no keys and no tokens."""

    version: str
    python: str
    platform: str
    pid: int
    models: tuple[str, ...]
    state: str
    uptime_seconds: float
    limits: dict[str, Any]
    engine_config: dict[str, Any]
    server_config: dict[str, Any]
    worker: dict[str, Any]
    """The worker's report of its load."""
    packages: dict[str, str]
    """Versions."""


class LoadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """Serve a LoRA adapter under a name. The fields are vLLM's."""

    lora_name: str
    lora_path: str
    """A folder in PEFT's format below one of `--lora-dir`; relative paths begin there."""
    load_inplace: bool = False
    """Take the place of an adapter of that name; requests that have begun keep the old one."""
    base_model_name: str | None = None
    """Reported as its parent, instead of the model's name."""


class UnloadAdapterBody(msgspec.Struct, frozen=True, kw_only=True):
    """Serve a LoRA adapter no more. Requests that have begun go on."""

    lora_name: str
    lora_int_id: int | None = None
    """Accepted, as vLLM's clients send it; the name decides."""


class AdapterName(msgspec.Struct, frozen=True):
    lora_name: str


class KVSessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A session of a tenant."""

    tenant: str
    session: str


class KVPrefetchAnswer(msgspec.Struct, frozen=True):
    report: PrefetchReport | None
    """None: the tenant has no such session."""


class KVDropAnswer(msgspec.Struct, frozen=True):
    blocks: int | None
    """None: the tenant has no such session."""


class SessionPrefetch(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of a session's last turns were found. Those that are loading arrive after this answer."""

    id: str
    object: Literal["kv.session"] = "kv.session"
    present_blocks: int
    """On the device already."""
    loading_blocks: int
    """On their way from a tier, or asked for there."""
    missing_blocks: int
    """In no tier: the next request computes them."""
    no_room_blocks: int
    """Left in their tier, since free and unleased blocks of the device did not suffice."""


class SessionDropped(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["kv.session"] = "kv.session"
    deleted: bool = True
    evicted_first: int
    """Blocks that only this session has, and that are evicted before all others."""
