"""Starting an engine: find the model, read what the API side needs, load the worker where it is to live.

This is the one place where every failure while loading becomes a `ModelLoadError`, flat, with the root cause behind it.
"""

import threading  # noqa: TID251 - a flag that the loading thread reads
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import anyio
import msgspec

from troupellm.actors.adapters.actor import AdapterSources
from troupellm.actors.engine.adapter_sources import adapter_sources, load_modules
from troupellm.actors.engine.system import EngineParts, System
from troupellm.actors.engine.wiring import MediaParts
from troupellm.actors.guide.compiler import CompilerSettings, ProcessCompiler
from troupellm.actors.metrics.exposition import Exposition
from troupellm.actors.output.detokenizer import TextTables
from troupellm.actors.runtime.ports import Clock, LoopPort, Randomness
from troupellm.actors.runtime.processes import Processes
from troupellm.actors.runtime.thread_pool import StepThread, ThreadPool
from troupellm.actors.worker.process_host import ProcessWorker
from troupellm.actors.worker.thread_host import ThreadWorker, WorkerHost
from troupellm.models.chat_parsers.served_parser import ChatFormat, chat_format_of
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import Renderer, TemplateProcesses
from troupellm.models.config.generation_config import load_generation_defaults, token_cap
from troupellm.models.hub.errors import load_failure
from troupellm.models.hub.model_folder import Followed
from troupellm.models.hub.secret import prefix_hash_key, read_secret, secret_file
from troupellm.models.hub.source import resolve_model, served_names
from troupellm.models.load.early_check import check_before_weights, check_stored
from troupellm.models.media.description import MediaModel, describe_media
from troupellm.models.processes.preload_torch import frozen, import_beside
from troupellm.models.tokenizer.served import check_fit, fit_notes, tokenizer_folder
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.models.worker.local_names import with_local_names
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError, EngineStopped, TroupeError, WorkerCrashed
from troupellm.protocol.messages.snapshot import EngineSnapshot
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink, Worker, WorkerReady
from troupellm.protocol.messages.worker_abilities import HasIdleWork, HasMeanwhile
from troupellm.protocol.params.sampling import Limits
from troupellm.protocol.wire.worker import MODEL_WORKER, resolve

if TYPE_CHECKING:
    from troupellm.actors.media.preparer import ProcessPreparer

POOL_SIZE = 4
"""Two of them for long texts at most: see `long_texts`."""
HASH_KEY_BYTES = 32
CLOSE_SECONDS = 30.0
HUNG_SECONDS = 1.0
"""How long a worker whose step hangs is waited for."""

WorkerFactory = Callable[[Path], Worker]


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    names: tuple[str, ...]
    folder: Path
    tokenizer_folder: Path
    """Where tokenizer and chat template were read."""
    tokenizer: Tokenizer
    tables: TextTables
    chat_template: ChatTemplate
    chat_format: ChatFormat
    defaults: dict[str, Any]
    media: MediaModel | None
    """Of a model that sees images."""
    worker_host: WorkerHost
    ready: WorkerReady


class Machinery:
    """The threads and processes of one engine, and the worker that lives on one of them."""

    def __init__(self, name: str, processes: Processes) -> None:
        self.thread = StepThread(f"{name}-step")
        self.pool = ThreadPool(f"{name}-pool", POOL_SIZE)
        self.loop = LoopPort()
        self._processes = processes
        self._unwanted = threading.Event()
        self._worker: Worker | None = None
        self._process: ProcessWorker | None = None
        self._compiler: ProcessCompiler | None = None
        self._preparer: ProcessPreparer | None = None
        self._templates = TemplateProcesses()
        self._frozen = False

    async def load(
        self, config: EngineConfig, progress: ProgressSink | None, factory: WorkerFactory | str | None
    ) -> Loaded:
        """Raises ModelLoadError; being cancelled stops the loading at its next report of progress.

        factory: makes the worker from the model's folder; for a worker process its import path, as module:name.
        """
        sink = self._sink(progress)
        try:
            if config.has_worker_process:
                await self._start_process(config, progress, factory)
            folder, home, tokenizer, chat_format, defaults, media = await self.pool.run(
                _read, config, sink, self._templates, factory is None
            )
            if factory is None:  # before anything large is read
                await self.pool.run(check_fit, tokenizer, folder, home, None)
                config = await self.pool.run(with_local_names, config, home, sink)
            tables = await self.pool.run(TextTables, tokenizer)
            worker_host, ready = await self._load_worker(config, sink, factory, folder)
            if factory is None:  # a custom worker may have another vocabulary
                await self.pool.run(check_fit, tokenizer, folder, home, ready.vocab_width)
                for note in fit_notes(tokenizer, ready.vocab_width):
                    sink(LoadProgress(phase="resolve", detail=note))
        except TroupeError:
            raise
        except Exception as error:
            raise load_failure(error) from error
        chat_format.template.fit(ready.max_model_len)
        return Loaded(
            names=served_names(config.model),
            folder=folder,
            tokenizer_folder=home,
            tokenizer=tokenizer,
            tables=tables,
            chat_template=chat_format.template,
            chat_format=chat_format,
            defaults=defaults,
            media=media,
            worker_host=worker_host,
            ready=ready,
        )

    async def _start_process(
        self, config: EngineConfig, progress: ProgressSink | None, factory: WorkerFactory | str | None
    ) -> None:
        """Its imports take longest, so they begin first."""
        if factory is not None and not isinstance(factory, str):
            raise ConfigError("a worker process needs its worker's import path, not a function", param="worker")
        self._process = ProcessWorker(
            factory or MODEL_WORKER,
            config,
            self._processes,
            progress or (lambda _: None),
            spare=config.worker.spare_worker,
        )
        await self._process.prepare()

    async def _load_worker(
        self, config: EngineConfig, sink: ProgressSink, factory: WorkerFactory | str | None, folder: Path
    ) -> tuple[WorkerHost, WorkerReady]:
        if self._process is not None:
            self._process.locate(folder, config)
            return self._process, await self._process.start()
        make = resolve(factory) if isinstance(factory, str) else factory or self._model_worker
        worker = self._worker = await self.thread.run(make, folder)
        ready = await self.thread.run(worker.load, config, sink)
        if isinstance(worker, HasMeanwhile):
            worker.meanwhile(self.thread.hold())
        if isinstance(worker, HasIdleWork):
            self.thread.when_idle(worker.idle)
        return ThreadWorker(worker, self.thread, ready, config.worker.step_deadline, self.pool), ready

    def compiler(self, config: EngineConfig, loaded: Loaded) -> ProcessCompiler:
        """Of guides; `close` ends its processes."""
        settings = CompilerSettings(
            tokenizer_folder=str(loaded.tokenizer_folder),
            follow_links=isinstance(loaded.tokenizer_folder, Followed),
            vocab_width=loaded.ready.vocab_width,
            timeout=config.guide.guide_timeout,
            memory_bytes=config.guide.guide_memory_bytes,
            depth=config.guide.guide_depth,
        )
        self._compiler = ProcessCompiler(settings, self._processes)
        return self._compiler

    def media(self, config: EngineConfig, loaded: Loaded) -> MediaParts | None:
        """For images, where the model sees them; `close` ends its processes."""
        ability = loaded.ready.media
        if loaded.media is None or ability is None:
            return None
        from troupellm.actors.media.preparer import ProcessPreparer

        links = isinstance(loaded.folder, Followed)
        self._preparer = ProcessPreparer(str(loaded.folder), config.media, self._processes, follow_links=links)
        return MediaParts(loaded.media, self._preparer, ability)

    @property
    def num_template_processes(self) -> int:
        return len(self._templates.pids)

    async def close(self, *, hung: bool = False) -> bool:
        """Free the model, join the threads, end the processes; False when something had to be left behind."""
        self._unwanted.set()
        seconds = HUNG_SECONDS if hung else CLOSE_SECONDS
        ended = self._process is None or await self._process.close()
        ended &= self._compiler is None or await self._compiler.close()
        ended &= self._preparer is None or await self._preparer.close()
        self._templates.close()
        worker, self._worker = self._worker, None
        if worker is not None:
            with anyio.move_on_after(seconds):
                await self.thread.run(worker.close)
        joined = await self.thread.close(seconds)
        if self._frozen:
            self._frozen = False
            frozen.release()
        return await self.pool.close(seconds) and joined and ended

    def _model_worker(self, folder: Path) -> Worker:
        """On the step thread, since importing torch takes seconds."""
        module, self._frozen = import_beside("troupellm.models.worker.worker")
        return cast(Worker, module.ModelWorker(folder))  # its tickets are a type of its own, opaque to everybody else

    def _sink(self, progress: ProgressSink | None) -> ProgressSink:
        """Called on the loading threads; hands reports to the host on its own event loop."""

        def report(message: LoadProgress) -> None:
            if self._unwanted.is_set():
                raise EngineStopped("the engine was closed while it was starting")
            if progress is not None:
                self.loop.post(lambda: progress(message))

        return report


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A started engine."""

    loaded: Loaded
    limits: Limits
    machinery: Machinery
    system: System
    exposition: Exposition
    adapters: AdapterSources | None = None
    """None: no adapters are served."""


async def start(
    stack: AsyncExitStack,
    config: EngineConfig,
    *,
    progress: ProgressSink | None,
    factory: WorkerFactory | str | None,
    processes: Processes,
    clock: Clock,
    randomness: Randomness,
    snapshot: Callable[[], EngineSnapshot],
) -> Running:
    """Load the model and start the actors; `stack` undoes all of it, also when a cancellation interrupts it.

    Raises:
        ModelLoadError: the model cannot be served.
        ConfigError: settings contradict each other, or do not fit the model or the machine.
        Exception: the root cause of an actor's failure to start.
    """
    config.check()
    machinery = Machinery("troupellm", processes)
    stack.push_async_exit(_Shielded(lambda: _close(machinery, systems)))
    systems: list[System] = []
    secret = await machinery.pool.run(_secret, config) or bytes.fromhex(randomness.token(HASH_KEY_BYTES))
    loaded = await machinery.load(config, progress, factory)
    ready = loaded.ready
    limits = Limits(
        vocab_width=ready.vocab_width,
        max_model_len=ready.max_model_len,
        max_logprobs=config.stream.max_logprobs,
        logprobs_mode=config.stream.logprobs_mode,
        max_tokens=token_cap(config.model.override_generation_config),
        stream_interval=config.stream.stream_interval,
    )
    adapters = adapter_sources(config.lora, ready, loaded.names, machinery.pool, config.model)
    parts = EngineParts(
        config=config, ready=ready, limits=limits, worker_host=loaded.worker_host, tokenizer=loaded.tokenizer,
        tables=loaded.tables, chat_template=loaded.chat_template, pool=machinery.pool,
        compiler=machinery.compiler(config, loaded),
        clock=clock, randomness=randomness, hash_key=prefix_hash_key(secret, ready.fingerprint), adapters=adapters,
        media=machinery.media(config, loaded),
    )  # fmt: skip
    system = System(parts)
    systems.append(system)
    group = anyio.create_task_group()
    await group.__aenter__()
    # The group never hears of the block's exception, which it would wrap; its one child never raises.
    stack.push_async_exit(lambda *_: group.__aexit__(None, None, None))
    stack.push_async_exit(_Shielded(system.stop))
    try:
        await group.start(system.run)
    except RuntimeError:
        if system.failure is None:
            raise
        raise system.failure from None
    if adapters is not None:
        await load_modules(system, config.lora, adapters)
    exposition = Exposition(system.store, snapshot, _cache_config(config, ready), config.parallel.data_parallel_rank)
    return Running(
        loaded=loaded,
        limits=limits,
        machinery=machinery,
        system=system,
        exposition=exposition,
        adapters=adapters,
    )


class _Shielded:
    """An exit callback that no cancel scope can cut short."""

    def __init__(self, call: Callable[[], Awaitable[None]]) -> None:
        self._call = call

    async def __call__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._call()


async def _close(machinery: Machinery, systems: Sequence[System]) -> None:
    hung = any(isinstance(system.failure, WorkerCrashed) for system in systems)
    if not await machinery.close(hung=hung):
        warnings.warn("a thread was left behind in a model step that does not end", ResourceWarning, stacklevel=2)


def _cache_config(config: EngineConfig, ready: WorkerReady) -> dict[str, str]:
    """Labels of the cache_config_info metric."""
    return {
        "block_size": str(ready.block_size),
        "num_gpu_blocks": str(ready.num_blocks),
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "gpu_memory_utilization": str(config.cache.gpu_memory_utilization),
        "cache_dtype": ready.dtype if ready.cache_dtype == "auto" else ready.cache_dtype,
        "kv_cache_memory_bytes": str(ready.kv_cache_bytes),
    }


def _secret(config: EngineConfig) -> bytes | None:
    """None: nothing outlives this engine."""
    path = secret_file(config)
    return None if path is None else read_secret(path)


def _read(
    config: EngineConfig, progress: ProgressSink, renderer: Renderer, checked: bool
) -> tuple[Path, Path, Tokenizer, ChatFormat, dict[str, Any], MediaModel | None]:
    """The parts of the model's folder that the API side needs.

    Args:
        checked: refuse what our worker cannot read; a worker that the caller brings along may read other models.
    """
    model = config.model
    if checked:
        folder = resolve_model(model, progress, lambda folder: check_before_weights(folder, model, renderer))
        check_stored(folder, model)
    else:
        folder = resolve_model(model, progress)
    home = tokenizer_folder(folder, model, progress)
    tokenizer = Tokenizer.load(home)
    template = ChatTemplate.load(home, model.chat_template, renderer)
    chat_format = chat_format_of(model, tokenizer, template, home)
    defaults = load_generation_defaults(folder, model.generation_config, model.override_generation_config)
    media = describe_media(folder, config.media) if checked else None
    return folder, home, tokenizer, chat_format, defaults, media
