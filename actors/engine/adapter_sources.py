"""Where an engine finds LoRA adapters, and how its adapter library is asked."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from troupellm.actors.adapters.actor import AdapterSources, Inspected
from troupellm.actors.adapters.registry import AdapterRegistry
from troupellm.actors.adapters.resolvers import FolderResolver, HubResolver, LoraResolver, installed_resolvers
from troupellm.actors.engine.system import System
from troupellm.actors.runtime.mailbox import MailboxClosed
from troupellm.actors.runtime.ports import Threads
from troupellm.actors.runtime.waiter import new_waiter
from troupellm.models.adapters.files import adapter_digest, adapter_header
from troupellm.models.hub.adapter import HubAdapter, NoAdapter
from troupellm.models.hub.resolve import NotOnHub
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.errors import (
    AdapterError,
    ConfigError,
    EngineStopped,
    InvalidRequest,
    ModelLoadError,
    TroupeError,
)
from troupellm.protocol.messages.adapter_library import AdapterMessage, AddAdapter
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.messages.worker import WorkerReady

Done = Callable[[AdapterInfo | TroupeError], None]


async def ask_library(system: System, make: Callable[[Done], AdapterMessage]) -> AdapterInfo:
    """One message to the adapter library, and its answer.

    Raises:
        InvalidRequest: no adapters are served.
        EngineStopped: the engine was closed.
        TroupeError: the library's refusal.
    """
    if system.adapters is None:
        raise InvalidRequest("no adapters are served; start with enable_lora", code="not_configured")
    answers: list[AdapterInfo | TroupeError] = []
    waiter = new_waiter()

    def done(answer: AdapterInfo | TroupeError) -> None:
        answers.append(answer)
        waiter.wake()

    try:
        await system.adapters.put(make(done))
    except MailboxClosed:
        raise system.error("the engine was closed") from None
    await waiter.wait()
    answer = answers[0]
    if isinstance(answer, TroupeError):
        raise answer
    return answer


def adapter_sources(
    config: LoraConfig, ready: WorkerReady, model_names: tuple[str, ...], threads: Threads, model: ModelConfig
) -> AdapterSources | None:
    """Where an engine finds adapters; None where it serves none.

    Args:
        model: whether links out of `lora_dir` are followed, and how the hub is reached.

    Raises:
        ConfigError: the model or its device serves no adapters, or a plug-in cannot be loaded.
    """
    if not config.enabled:
        return None
    if not ready.max_loras:
        raise ConfigError(
            f"enable_lora: {ready.architecture} on {ready.device} serves no adapters; merge the adapter into the model",
            param="enable_lora",
        )
    own: list[LoraResolver] = []
    if config.dirs:
        own.append(FolderResolver(config.dirs, threads, links=model.allow_model_links))
    if config.lora_allow_hub:
        own.append(HubResolver(config.lora_allow_hub, partial(_fetched, model), threads))
    return AdapterSources(
        registry=AdapterRegistry(model_names),
        resolvers=own + installed_resolvers(),
        inspect=_inspect,
        parent=model_names[0],
        most_searches=config.host_adapters,
    )


async def load_modules(system: System, config: LoraConfig, sources: AdapterSources) -> None:
    """Load the adapters that the settings name.

    Raises:
        ModelLoadError: one cannot be served; names it.
    """
    for module in config.modules:
        add = partial(
            AddAdapter,
            name=module.name,
            folder=plain_folder(module.path),
            parent=module.base_model_name or sources.parent,
            replace=False,
        )
        try:
            await ask_library(system, lambda done, add=add: add(done=done))  # type: ignore[misc]
        except TroupeError as error:
            raise ModelLoadError(f"lora_modules: {module.name}: {error.message}") from error


def plain_folder(path: str | Path) -> str:
    """A path as it is wherever the process works."""
    return os.path.abspath(os.path.expanduser(path))


def _fetched(config: ModelConfig, repo: str) -> Path | None:
    """The adapter of a repository, from the hub or the cache, on a thread; None where there is no such repository.

    Raises:
        AdapterError: it holds no adapter.
        EngineStopped: it cannot be fetched now.
    """
    try:
        return HubAdapter(repo, config).resolve(lambda _: None)
    except NotOnHub:
        return None
    except NoAdapter as error:
        raise AdapterError(error.message) from error
    except ModelLoadError as error:
        raise EngineStopped(error.message, code="server_is_overloaded") from error


def _inspect(folder: str) -> Inspected:
    """On a thread. The header is checked before all of the weights are read."""
    header = adapter_header(Path(folder))
    return Inspected(digest=adapter_digest(Path(folder)), rank=header.rank, num_bytes=header.num_bytes)
