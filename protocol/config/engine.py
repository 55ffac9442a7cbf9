"""One typed configuration tree; every knob is a flag, a TOML key and a keyword of `Engine`.

Field names are unique across sections, so `Engine("model", max_num_seqs=8)` and `--max-num-seqs 8` need no section.
Each actor is handed its own section only. Units stand in the names or docstrings; `help` texts feed the command line.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.config.bodies import BodyConfig
from troupellm.protocol.config.cache import CacheConfig as CacheConfig
from troupellm.protocol.config.kv_hints import DEFAULT_LEASES, LeaseConfig
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.config.parallel import ParallelConfig
from troupellm.protocol.config.sdk_headers import SDK_HEADERS
from troupellm.protocol.config.setting_types import (
    Auto,
    Count,
    OnLoad,
    PositiveInt,
    Seconds,
    StoredAs,
    help_text as _help,
)
from troupellm.protocol.config.speculation import SpeculationConfig, read_speculative_config
from troupellm.protocol.config.structured_outputs import GuideConfig
from troupellm.protocol.config.tenant import TenantConfig as TenantConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.params.logprobs import LogprobsMode
from troupellm.protocol.vllm.settings import own_settings


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and how it is read."""

    model: Annotated[str | None, _help("folder, GGUF file, owner/name[@revision][:TAG], or the built-in one")] = None
    tokenizer: Annotated[str | None, _help("folder, GGUF file or hub id of the tokenizer, if not the model's")] = None
    served_model_name: Annotated[tuple[str, ...], _help("name or names clients may use; the first is reported")] = ()
    revision: Annotated[str | None, _help("branch, tag or commit of a hub id, as owner/name@revision")] = None
    download_dir: Annotated[str | None, _help("where hub models are cached (default: HF_HOME)")] = None
    hf_token: Annotated[str | None, _help("hub token (default: HF_TOKEN)")] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], _help("dummy fills random weights: for benchmarks")
    ] = "auto"
    allow_model_links: Annotated[bool, _help("follow links out of the model's folder, wherever they lead")] = False
    model_impl: Annotated[
        Literal["auto", "troupellm", "transformers"],
        _help("whose code runs a decoder; auto: troupellm's, and that of transformers for families it does not have"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float", "half"],
        _help("auto: float32 on a CPU, the checkpoint's own on a GPU"),
    ] = "auto"
    quantization: Annotated[
        OnLoad | StoredAs | None,
        _help("how a plain checkpoint is quantized while it is read (int8 and fp8: inputs too), or how it is stored"),
    ] = None
    gguf_inputs: Annotated[Literal["int16", "int8"], _help("to what a CPU rounds the inputs of GGUF blocks")] = "int16"
    max_model_len: Annotated[
        PositiveInt | Auto, _help("context length; auto: the model's own, as far as the KV cache holds it")
    ] = "auto"
    generation_config: Annotated[
        str, _help("auto: defaults from the model's generation_config.json; vllm: none; or a folder that has another")
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | str | None, _help("JSON object over those defaults; its max_new_tokens is a cap, too")
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        _help("what the model is for; auto: all it can do, decoders write text and embed"),
    ] = "auto"
    convert: Annotated[
        Literal["auto", "none", "embed", "classify"],
        _help("none: no pooling that the checkpoint was not made for; embed and classify: refused unless it can"),
    ] = "auto"
    pooler_config: Annotated[
        str | None, _help("JSON: pooling_type CLS, LAST or MEAN, use_activation, matryoshka_dimensions, score_tokens")
    ] = None
    chat_template: Annotated[str | None, _help("file or text of a Jinja chat template")] = None
    tool_call_parser: Annotated[
        str, _help("how the model writes tool calls; auto: as its chat template shows; none: it makes none")
    ] = "auto"
    reasoning_parser: Annotated[
        str, _help("how the model marks its thoughts; auto: as its chat template shows; none: it has none")
    ] = "auto"
    enable_auto_tool_choice: Annotated[
        bool, _help("tools may be called where a request does not say so; off: only its tool_choice decides")
    ] = True
    seed: Annotated[Count, _help("seed of everything that was not given one; 0 draws one at start")] = 0


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a step and of the waiting queue."""

    max_num_seqs: Annotated[PositiveInt, _help("sequences in one step")] = 256
    max_num_batched_tokens: Annotated[PositiveInt, _help("tokens computed in one step")] = 2048
    enable_chunked_prefill: Annotated[
        bool, _help("split long prompts over steps; off lets max_num_batched_tokens bound the prompt")
    ] = True
    max_num_queued_reqs: Annotated[
        Count, _help("requests that may wait beyond those running; more are refused with 429")
    ] = 512
    max_num_queued_tokens: Annotated[
        PositiveInt | None, _help("prompt tokens that may wait (default: no bound beyond requests)")
    ] = None
    scheduling_policy: Annotated[
        Literal["fair", "fcfs", "priority"],
        _help(
            "order of the waiting queue; fair: equal shares for all API keys, and first come first served within one"
        ),
    ] = "fair"
    queue_timeout: Annotated[
        Seconds | None, _help("seconds a request may wait to begin; then it is refused with 503 (default: no bound)")
    ] = None
    max_num_prefill_tokens: Annotated[
        PositiveInt | Auto, _help("prompt tokens in one step; auto: as many as keep the device busy, alone more")
    ] = "auto"
    itl_target_ms: Annotated[
        float,
        Meta(ge=0.0, description="milliseconds between the tokens of running streams while prompts come; 0 is off"),
    ] = 400.0
    tenants: tuple[TenantConfig, ...] = ()
    """Whose names are known, with their shares and limits; the server reads them from its key file."""
    state_snapshot_interval: Annotated[
        Count,
        _help("of models with states: tokens between those that later prompts can go on from, beside ends of prompts"),
    ] = 2048
    async_scheduling: Annotated[bool, _help("plan the next step while one runs; off waits for its result")] = True
    max_plans_in_flight: Annotated[
        int, Meta(ge=1, le=2, description="steps planned before the first one has come back")
    ] = 2

    @property
    def plans_in_flight(self) -> int:
        """How many there are in the end."""
        return self.max_plans_in_flight if self.async_scheduling else 1


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Delivery of tokens to readers."""

    stream_budget_tokens: Annotated[
        PositiveInt, _help("undelivered tokens after which a reader's own sequence is paused")
    ] = 256
    flush_interval: Annotated[
        Seconds | None,
        _help(
            "seconds between wakes of one stream (default: 0.02 in the server, less for few and more for many; else 0)"
        ),
    ] = None
    wakes_per_second: Annotated[Count | None, _help("of all streams; shortens a default flush_interval")] = None
    most_wakes_per_second: Annotated[
        Count | None, _help("of all streams; lengthens flush_interval, to 0.1 at most")
    ] = None
    stall_timeout: Annotated[
        Seconds | None, _help("seconds after which a stalled reader is aborted (default: server 60, embedded never)")
    ] = None
    max_logprobs: Annotated[Count, _help("most log-probabilities a request may ask for")] = 20
    logprobs_mode: Annotated[
        LogprobsMode, _help("what log-probabilities are: before or after what sampling does, normalised or as logits")
    ] = "raw_logprobs"
    stream_interval: Annotated[
        PositiveInt | None,
        _help("tokens per event of a stream, at least; requests may ask for more (default: by time)"),
    ] = None


EMBEDDED_STEP_TIMEOUT = 300.0
"""Generous, because a step that hangs on a thread costs the engine."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model step runs."""

    device: Annotated[Literal["auto", "cpu", "cuda"], _help("auto: cuda where there is one")] = "auto"
    poison_memory: Annotated[
        Literal["off", "nan", "0x7f"], _help("debugging: what unwritten KV memory holds, so that reading it shows")
    ] = "off"
    attention_backend: Annotated[
        str, _help("who computes attention: triton, native, torch, sdpa, flex or reference; auto: the first that can")
    ] = "auto"
    batch_invariant: Annotated[
        bool, _help("compute the same logits for a sequence, to the bit, whatever else is in the batch; slower")
    ] = False
    enforce_eager: Annotated[bool, _help("on a GPU: launch every kernel by itself, without CUDA graphs")] = False
    cudagraph_capture_sizes: Annotated[
        tuple[PositiveInt, ...],
        _help("batch sizes that get a CUDA graph (default: 1, 2, 4, 8 to 256 by 8 and to 512 by 16, as far as needed)"),
    ] = ()
    num_threads: Annotated[PositiveInt | None, _help("threads of the model step on a CPU (default: all cores)")] = None
    logits_processors: Annotated[
        tuple[str, ...],
        _help("plug-in that requests may use, as name=module:Class, repeatable; beside those installed"),
    ] = ()
    default_logits_processors: Annotated[
        tuple[str, ...],
        _help("plug-in that changes the scores of every request, as name or name={its arguments in JSON}, repeatable"),
    ] = ()
    step_timeout: Annotated[
        Seconds | None,
        _help(
            "seconds after which a step counts as hung: a process is replaced, a thread fails the engine; 0 is off "
            "(default: server 60, embedded 300)"
        ),
    ] = None
    watchdog_timeout: Annotated[
        Seconds, _help("seconds without progress while there is work, before the engine is mended or fails; 0 is off")
    ] = 5.0
    worker_process: Annotated[
        bool | None, _help("run the model in a process of its own (default: in the server yes, embedded no)")
    ] = None
    spare_worker: Annotated[
        bool, _help("keep a second worker process, which has imported all and waits, to replace one that dies")
    ] = True

    @property
    def step_deadline(self) -> float | None:
        """Seconds that a step may take in the end; None where they are not bounded."""
        return (EMBEDDED_STEP_TIMEOUT if self.step_timeout is None else self.step_timeout) or None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    stream: StreamConfig = StreamConfig()
    worker: WorkerConfig = WorkerConfig()
    guide: GuideConfig = GuideConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    offload: OffloadConfig = OffloadConfig()
    leases: LeaseConfig = DEFAULT_LEASES
    lora: LoraConfig = LoraConfig()
    media: MediaConfig = MediaConfig()
    parallel: ParallelConfig = ParallelConfig()

    @property
    def has_worker_process(self) -> bool:
        """True if the model runs in a process of its own, as several ranks always do."""
        return bool(self.worker.worker_process) or self.parallel.tensor_parallel_size > 1

    def check(self) -> None:
        """
        Raises:
            ConfigError: settings of different sections contradict each other.
        """
        if self.parallel.tensor_parallel_size > 1 and self.worker.worker_process is False:
            raise ConfigError(
                "worker_process must not be off with tensor_parallel_size above 1: each rank is a process",
                param="worker_process",
            )
        if self.offload.on and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "kv_offloading_size needs enable_prefix_caching: blocks that left the device are found by their prefix",
                param="kv_offloading_size",
            )

    @classmethod
    def from_flat(cls, settings: dict[str, Any]) -> "EngineConfig":
        """Sort flat settings into their sections, check and convert them.

        Raises:
            ConfigError: an unknown name, or a value of the wrong type or out of range; `param` names it.
        """
        sections: dict[str, dict[str, Any]] = {}
        homes = {
            field.name: section.name
            for section in msgspec.structs.fields(cls)
            for field in msgspec.structs.fields(section.type)
        }
        for name, value in own_settings(settings, homes).items():
            if name not in homes:
                raise ConfigError(f"unknown setting {name}", param=name, code="unknown_parameter")
            if name == "speculative_config":
                value = read_speculative_config(value)
            sections.setdefault(homes[name], {})[name] = value
        try:
            return msgspec.convert(sections, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):  # a section's own check, which names the setting
                raise error.__cause__ from None
            text, _, path = with_allowed_values(error, cls).partition(" - at `$.")
            name = path.rstrip("`").replace("[...]", "").rsplit(".", maxsplit=1)[-1]
            raise ConfigError(f"{name}: {text}", param=name) from None


class ServerConfig(BodyConfig, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0 takes a free port")] = 8000
    uds: Annotated[str | None, _help("listen on a unix socket instead")] = None
    api_server_count: Annotated[
        int, Meta(ge=0, le=64, description="processes that speak HTTP, beside the engine's; 0: the engine's own does")
    ] = 0
    root_path: Annotated[str, _help("path prefix at which a proxy serves this, whether it strips it or not")] = ""
    api_key: Annotated[tuple[str, ...], _help("bearer key, repeatable (environment: TROUPE_API_KEY)")] = ()
    api_key_file: Annotated[str | None, _help("TOML file of API keys with names, limits, weights and priorities")] = (
        None
    )
    admin_api_key: Annotated[
        tuple[str, ...], _help("key for the admin routes, repeatable; without it they are not there")
    ] = ()
    admin_uds: Annotated[str | None, _help("serve the admin routes at a unix socket, which needs no key")] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        _help(
            "host names that requests may be for, repeatable, * for any (default: any; on loopback this machine's own)"
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], _help("origins whose pages may call this server, repeatable, * for any (default: its own)")
    ] = ()
    allowed_methods: Annotated[tuple[str, ...], _help("methods that such pages may use, repeatable")] = (
        "GET",
        "POST",
        "DELETE",
    )
    allowed_headers: Annotated[
        tuple[str, ...], _help("headers that such pages may send, repeatable (default: what the clients' SDKs send)")
    ] = SDK_HEADERS
    allow_credentials: Annotated[bool, _help("such pages may send cookies; not with an origin of *")] = False
    ssl_certfile: Annotated[str | None, _help("certificate of the server: serve HTTPS, and HTTP/2 over it")] = None
    ssl_keyfile: Annotated[str | None, _help("its key, if it is not in the same file")] = None
    ssl_ca_certs: Annotated[str | None, _help("certificate authorities: clients must show a certificate of one")] = None
    h2c: Annotated[bool, _help("take HTTP/2 without TLS too, from clients that begin with it")] = False
    keep_alive_timeout: Annotated[Seconds, _help("seconds an idle connection is kept; 0 keeps it for ever")] = 75.0
    header_timeout: Annotated[Seconds, _help("seconds a client may take to send a request's head; 0 is off")] = 20.0
    profile_dir: Annotated[str | None, _help("folder for the traces of /start_profile")] = None
    files_dir: Annotated[str | None, _help("folder for uploaded files and batches, kept over restarts; else none")] = (
        None
    )
    max_file_bytes: Annotated[PositiveInt, _help("largest uploaded file")] = 200 * 2**20
    max_files: Annotated[PositiveInt, _help("files that each API key may have")] = 10_000
    max_stored_bytes: Annotated[PositiveInt, _help("bytes of files that each API key may have")] = 10 * 2**30
    max_batch_lines: Annotated[PositiveInt, _help("requests in one batch")] = 50_000
    max_batches: Annotated[PositiveInt, _help("unfinished batches that each API key may have")] = 100
    batch_concurrency: Annotated[
        PositiveInt | None,
        _help("requests of batches at once, while nobody waits (default: half of max_num_seqs)"),
    ] = None
    shutdown_timeout: Annotated[Seconds, _help("seconds that running streams get after SIGTERM")] = 30.0
    sse_keep_alive_interval: Annotated[Seconds, _help("seconds of silence before a comment; 0 is off")] = 15.0
    sse_send_buffer: Annotated[PositiveInt, _help("bytes of kernel send buffer per connection")] = 16384
    write_timeout: Annotated[Seconds, _help("seconds one write to a stalled reader may take")] = 60.0
    overload_status: Annotated[Literal[429, 503], _help("when full, or at a key's limit; 503 for balancers")] = 429
    max_prompts: Annotated[PositiveInt, _help("prompts in one completions call")] = 128
    max_pooling_inputs: Annotated[PositiveInt, _help("inputs in one call for embeddings, classes, scores or ranks")] = (
        2048
    )
    ui: Annotated[bool | None, _help("serve the page at / to browsers (default: on a loopback address only)")] = None
    ollama: Annotated[bool, _help("serve Ollama's API too, at /api")] = True
    trust_request_chat_template: Annotated[
        bool, _help("let requests bring a chat template of their own, under the limits of the sandbox")
    ] = False
    volatile_lines: Annotated[str | None, _help("file of regexes: system lines to move behind the user's text")] = None
    responses_store: Annotated[
        str | None, _help("SQLite file of what /v1/responses keeps (default: in memory, with one HTTP process)")
    ] = None
    responses_store_entries: Annotated[Count, _help("most responses that are kept; 0 keeps none")] = 10_000
    responses_store_bytes: Annotated[PositiveInt, _help("most bytes of the responses that are kept")] = 128 * 2**20
    responses_ttl: Annotated[
        float, Meta(gt=0.0, description="seconds a response is kept, if there is room for so long")
    ] = 86_400.0
    max_background_responses: Annotated[Count, _help("responses one HTTP process generates in the background")] = 64
    enable_request_id_headers: Annotated[bool, _help("use a client's X-Request-Id")] = True
    disable_access_log: Annotated[bool, _help("no line per request")] = False
    log_format: Annotated[Literal["text", "json"], _help("form of log lines")] = "text"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _help("least severe lines to log")] = "info"
    disable_log_stats: Annotated[bool, _help("no statistics line while there is work")] = False
    log_stats_interval: Annotated[
        float, Meta(gt=0.0, description="seconds between statistics lines while there is work")
    ] = 10.0
    loop_lag_warning: Annotated[
        Seconds, _help("seconds the event loop may be held up before a line says so; 0 is off")
    ] = 1.0
    metrics: Annotated[
        str,
        Meta(
            pattern=r"^(open|key|[1-9][0-9]{0,4})$",
            description="key: /metrics needs an API key; open: it needs none; or a port of its own, without a key",
        ),
    ] = "key"
    metrics_compat: Annotated[Literal["vllm", "none"], _help("vllm: also export metrics under vLLM's names")] = "vllm"
    max_connections: Annotated[
        PositiveInt | None,
        _help("connections of one HTTP process; one more closes the longest idle (default: by the descriptors' limit)"),
    ] = None
    backlog: Annotated[PositiveInt, _help("connections that may wait to be accepted")] = 2048
